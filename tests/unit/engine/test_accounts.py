"""No failure while requests are opened leaves one counted as live."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from penstock.core.errors import EngineDeadError, RequestError
from penstock.core.request import EngineInfo, Request, Timings
from penstock.core.sampling import SamplingParams
from penstock.engine.async_llm import AsyncLLM
from penstock.engine.outputs import Delta, Outputs
from penstock.engine.process import Call, EngineOutputs
from penstock.server.promise import Promise


class BrokenError(Exception):
    """A bug."""


def frontend() -> AsyncLLM:
    """A frontend that believes its engine is up, and sends to nobody."""
    llm = AsyncLLM("nowhere")
    llm.info = EngineInfo(model="nowhere", architecture="", vocab_size=9, max_model_len=9, max_num_seqs=9,
                          max_num_batched_tokens=9, page_size=1, kv_tokens=9, pages_total=9, dtype="", device="",
                          weight_bytes=0, step_bytes=0, kv_bytes=0)
    llm.outputs = Outputs(None)
    llm._process._outbox = Outbox()  # type: ignore[assignment]
    return llm


class Outbox:
    """Takes what is sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, message: bytes, flags: int = 0) -> None:
        self.sent.append(message)


def request(name: str, **params: Any) -> Request:
    return Request(name, [1, 2], SamplingParams(max_tokens=2, seed=1, **params))


def test_a_request_that_cannot_be_encoded_is_not_live() -> None:
    llm = frontend()
    with pytest.raises(RequestError, match="64 bits"):
        llm.open([request("a"), request("b", top_k=2**64)])
    assert llm.live == 0 and len(llm.outputs) == 0
    sent = llm._process._outbox.sent  # type: ignore[attr-defined]
    # The first one was sent already, and is taken back.
    assert len(sent) == 2 and b"abort" in sent[-1]


@pytest.mark.parametrize("place", ["register", "send", "count"])
def test_any_failure_is_undone(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = frontend()

    def fail(*_: Any) -> None:
        raise BrokenError

    owner: Any = {"register": llm.outputs, "send": llm._process, "count": llm.traffic.figures}[place]
    monkeypatch.setattr(owner, {"register": "register", "send": "tell", "count": "started"}[place], fail)
    with pytest.raises(BrokenError):
        llm.open([request("a")])
    assert llm.live == 0 and len(llm.outputs) == 0


def test_a_dead_engine_takes_nothing() -> None:
    llm = frontend()
    llm._process.dead = "it was stopped"
    with pytest.raises(EngineDeadError):
        llm.open([request("a")])
    assert llm.live == 0


def test_a_number_too_large_from_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = frontend()

    async def run() -> None:
        from penstock.engine.inputs import Inputs

        assert llm.info is not None
        llm.inputs = Inputs(None, None, llm.info)
        with pytest.raises(RequestError, match="64 bits"):
            async for _ in llm.generate([1], SamplingParams(max_tokens=2), priority=2**70):
                pass

    asyncio.run(run())
    assert llm.live == 0 and not llm._given


def test_every_call_can_be_decoded() -> None:
    """Calls without an argument, too: an empty one would break the message."""
    for call in (Call("shutdown"), Call("abort", "", msgspec.Raw(msgspec.msgpack.encode(["a"])))):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(call), type=Call).name == call.name


def test_what_first_tokens_take_behind_the_engine_is_measured() -> None:
    """It is a part of the promises of later requests."""
    llm, now = frontend(), time.time()
    assert llm.traffic.delivery.late == 0
    stream = llm.open([request("a")])
    timings = Timings(now - 1.0, now - 0.9, now - 0.05, now - 0.01)
    llm._on_outputs(EngineOutputs([Delta("a", 0, [3], finish_reason="stop", timings=timings)], None))
    assert not stream.open and 0.05 <= llm.traffic.delivery.late < 0.5
    for _ in range(200):
        llm.traffic.delivery.took(0.002)
    assert llm.traffic.delivery.late == pytest.approx(0.002, rel=0.1)
    made = [request("b"), request("c")]
    for one in made:
        one.arrival = now
    Promise("interactive", 0.0, False).give(made, now - 0.03, llm.traffic.delivery.late)
    assert [one.beside for one in made] == pytest.approx([0.032, 0.032], rel=0.1)


def test_many_prompts_of_one_request_leave_room_for_others() -> None:
    llm = frontend()
    most = llm.options.max_num_queued_reqs + 9
    many = llm.open([request(f"m{i}") for i in range(2 * most)])
    others = [llm.open([request(f"o{i}")]) for i in range(most - 1)]
    with pytest.raises(RequestError, match=f"{most} requests with {3 * most - 1} prompts are open; at most {most} with"):
        llm.open([request("late")])
    many.close()
    others.append(llm.open([request("later")]))
    for stream in others[:3]:
        stream.close()
    llm.open([request(f"w{i}") for i in range(15 * most + 3)])
    with pytest.raises(RequestError, match="prompts are open"):
        llm.open([request("again")])
