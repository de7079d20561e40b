"""A server's log: its address, one line for each request, and a farewell."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import httpx
import pytest

import penstock
from penstock.cli.serve import addresses
from tests.system.served import Served


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    served = Served("canary", "--max-model-len", "256", "--max-num-seqs", "4", fresh=True)
    try:
        yield served
    finally:
        served.stop()


def line_of(server: Served, request_id: str) -> str:
    """The access log's line of a request, which is written when its answer is out."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        found = [line for line in server.log.splitlines() if line.endswith(f"[{request_id}]")]
        if found:
            assert len(found) == 1
            return found[0]
        time.sleep(0.02)
    raise AssertionError(f"no line of {request_id} in {server.log}")


def test_the_start_names_version_and_addresses(server: Served) -> None:
    assert server.log.startswith(f"Penstock {penstock.__version__}, loading canary\n")
    assert f"API {server.url}/v1, its description {server.url}/docs, metrics {server.url}/metrics\nready at {server.url}\n" \
        in server.log


def test_a_server_on_every_address_says_how_it_is_reached() -> None:
    text = addresses("http://0.0.0.0:8001")
    assert "listening on every address" in text and ":8001 from elsewhere" in text and "ready at http://127.0.0.1:8001" in text
    assert addresses("http://[::1]:8001").endswith("ready at http://[::1]:8001")


@pytest.mark.parametrize("stream", [False, True])
def test_one_line_a_request(server: Served, stream: bool) -> None:
    name = f"test-{stream}"
    body = {"prompt": "Once upon a time", "max_tokens": 5, "n": 2, "stream": stream, "ignore_eos": True}
    server.http.post("/v1/completions", json=body, headers={"X-Request-Id": name})
    line = line_of(server, name)
    assert re.search(r"\d I POST /v1/completions 200 in \d+\.\d{3} s: 4 tokens in( \(3 cached\))?, 10 out, length \[", line)
    assert "Once upon" not in server.log


def test_what_is_refused_or_odd(server: Served) -> None:
    server.http.post("/v1/completions", json={"max_tokens": "x"}, headers={"X-Request-Id": "bad"})
    assert re.search(r" POST /v1/completions 400 in \S+ s \[bad\]$", line_of(server, "bad"))
    server.http.get("/nothing%0aE%20forged", headers={"X-Request-Id": "odd"})
    assert " GET /nothing%0aE%20forged 404 in " in line_of(server, "odd")
    server.http.get("/health", headers={"X-Request-Id": "probe"})
    server.http.get("/v1/models", headers={"X-Request-Id": "after"})
    line_of(server, "after")
    assert "[probe]" not in server.log


def test_a_client_that_leaves(server: Served) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 200, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers={"X-Request-Id": "gone"}) as answer:
        next(answer.iter_lines())
    line = line_of(server, "gone")
    assert ", the client left [gone]" in line and " 200 in " in line


def test_the_farewell_and_silence() -> None:
    served = Served("canary", "--max-model-len", "256", "--max-num-seqs", "4", "--no-log-requests")
    try:
        served.complete(prompt="a b", max_tokens=3, ignore_eos=True)
        served.signal()
        assert served.ended() == 0
        assert re.search(r" I stopped after \d+ s: 1 answers, \d+ tokens in, 3 out$", served.log.strip())
        assert "POST" not in served.log and "Traceback" not in served.log
    finally:
        served.stop()
