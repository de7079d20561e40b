"""Hostile gRPC: every message gets a status that says whose fault it is, and calls beyond the most that run are refused."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.data import MODELS, need
from tests.hostile.test_bodies import Health
from tests.system.served import Served, served

grpc = pytest.importorskip("grpc")
pytest.importorskip("grpc_health")
calls = pytest.importorskip("tests.hostile.calls")
service = pytest.importorskip("penstock.server.kserve.service")

REFUSED = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED"}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(need(MODELS / "stories260k"), "--grpc-port", "0") as server:
        yield server
        assert server.complete(prompt="Once", max_tokens=4)["usage"]["completion_tokens"] == 4
        assert server.settle()["penstock:requests_live"] == 0
        assert "Traceback" not in server.log and "ERROR" not in server.log, server.log[-3000:]


def address(server: Served) -> str:
    found = re.search(r"gRPC at ([0-9.]+:[0-9]+)", server.log)
    assert found, server.log
    return found[1]


@pytest.mark.serial
def test_messages(server: Served) -> None:
    """Each with the size at which HTTP's bodies are tried, and the large ones at a million too."""
    large = [call for call in calls.calls(1_000_000) if len(call.data) > 500_000]
    with grpc.insecure_channel(address(server)) as channel, Health(server) as health:
        for call in [*calls.calls(), *large]:
            streams = calls.METHODS[call.method]
            made = (channel.stream_stream if streams else channel.unary_unary)(call.path)
            try:
                answer = made(iter([call.data]), timeout=30) if streams else made(call.data, timeout=30)
                if streams:
                    assert [*answer]
                code, details = "OK", ""
            except grpc.RpcError as error:
                code, details = error.code().name, error.details()
            assert code in REFUSED, f"{call.method} {call.name}: {code} {details}"
            assert (code == "OK" or details) and len(details) < 1000
    assert health.quick, sorted(health.seconds)[-3:]


def test_a_message_beyond_the_largest_body(server: Served) -> None:
    with grpc.insecure_channel(address(server)) as channel, pytest.raises(grpc.RpcError) as failed:
        channel.unary_unary(f"/{calls.SERVICE}/ModelInfer")(b"\x00" * ((4 << 20) + 1), timeout=30)
    assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_calls_that_say_nothing(server: Served) -> None:
    """Streams that are opened and left alone: others are refused beyond the most, and served again once they have ended."""
    async def run() -> tuple[int, Any]:
        # A connection has at most 100 streams unless the server allows more, so several are needed.
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.aio.insecure_channel(address(server), options=[*options, ("grpc.primary_user_agent", str(place))])
                    for place in range(8)]
        path = f"/{calls.SERVICE}/ModelStreamInfer"
        held = [channels[place % 8].stream_stream(path)() for place in range(service.MOST_CALLS + 200)]
        await asyncio.sleep(2)
        codes = [await call.code() for call in held if call.done()]
        refused = codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED)
        for call in held:
            call.cancel()
        await asyncio.sleep(1)
        live = await channels[0].unary_unary(f"/{calls.SERVICE}/ServerLive")(b"", timeout=10)
        for channel in channels:
            await channel.close()
        return refused, live

    refused, live = asyncio.run(run())
    assert refused >= 150 and live == b"\x08\x01"
    assert server.http.get("/health").status_code == 200
