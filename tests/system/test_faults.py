"""Clients that go away, engines that break or hang, requests that fail: what is lost, and what must not be."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.data import MODELS, need
from tests.system.fakes import BREAK, CRASH_ON_SUBMIT, FAIL, LATE, LATE_SECONDS, LONG, LONG_SECONDS, NAME, REFUSE, SLOW, STICK
from tests.system.served import PATIENT, Served, error_of, served

CANCELLED = int(os.environ.get("PENSTOCK_TEST_CANCELLED", "250"))
"""Requests of the cancellation test; a tenth of them more go before, to warm up."""


@pytest.fixture(scope="module")
def fake() -> Iterator[Served]:
    """A server over the fake engine that survives what its tests do."""
    with served(need(MODELS / "stories260k"), engine=NAME) as server:
        yield server


@pytest.fixture
def doomed() -> Iterator[Served]:
    """One that need not survive."""
    with served(need(MODELS / "stories260k"), "--stall-timeout", "1", engine=NAME) as server:
        yield server


def events_of(answer: httpx.Response) -> list[Any]:
    lines = [line[6:] for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


# -- clients


def test_random_cancellations_leave_nothing() -> None:
    """Requests whole and streaming, many given up at a random moment: rows and pages are back, memory does not grow."""
    # A cache so small that the first requests fill it: what finished requests leave there is not growth.
    with served(need(MODELS / "stories260k"), "--kv-cache-memory-bytes", "4M", fresh=True) as server:
        asyncio.run(send_and_give_up(server, CANCELLED // 5, seed=1))
        before = server.settle()
        memory = server.resident()
        asyncio.run(send_and_give_up(server, CANCELLED, seed=2))
        after = server.settle()
        assert after["penstock:pages_used"] == before["penstock:pages_used"] == 0
        assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
        assert after["vllm:request_success_total{abort}"] > before["vllm:request_success_total{abort}"] + CANCELLED / 25
        assert server.resident() < 1.02 * memory
        server.complete(prompt=[1], max_tokens=4)


async def send_and_give_up(server: Served, count: int, seed: int) -> None:
    rng = random.Random(seed)
    gate = asyncio.Semaphore(48)

    async def one(client: httpx.AsyncClient) -> None:
        prompt = [1] + [rng.randrange(3, 500) for _ in range(rng.randrange(1, 60))]
        body = {"prompt": prompt, "max_tokens": rng.randrange(1, 200), "n": rng.choice((1, 1, 2)), "stream": rng.random() < 0.5,
                "ignore_eos": True}
        # Half of the clients lose patience, most of them in the middle of an answer. Those that leave before their request is
        # read are not counted as aborted: nothing was begun for them.
        patience = rng.choice((None, rng.random() * 0.3))
        async with gate:
            try:
                async with asyncio.timeout(patience):
                    answer = await client.post("/v1/completions", json=body)
                    assert answer.status_code == 200, answer.text
            except TimeoutError:
                pass

    async with httpx.AsyncClient(base_url=server.url, timeout=60, headers=PATIENT,
                                 limits=httpx.Limits(max_connections=64)) as client:
        await asyncio.gather(*(one(client) for _ in range(count)))


@pytest.mark.serial
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_noticed(fake: Served, stream: bool) -> None:
    """The engine stops working for it within 50 ms or so; here within 250, beside whatever else this machine does."""

    before = fake.settle()["vllm:request_success_total{abort}"]

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=fake.url) as client:
            body = {"prompt": [SLOW], "max_tokens": 400, "stream": stream}
            sent = asyncio.create_task(client.post("/v1/completions", json=body))
            while fake.http.get("/load").json()["server_load"] == 0:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            sent.cancel()

    asyncio.run(leave())
    began = time.monotonic()
    while fake.http.get("/load").json()["server_load"]:
        assert time.monotonic() - began < 0.25
        time.sleep(0.005)
    assert fake.settle()["vllm:request_success_total{abort}"] == before + 1


def test_a_client_that_leaves_in_the_middle_of_its_request(fake: Served) -> None:
    host, port = fake.url.removeprefix("http://").split(":")
    line = b"POST /v1/completions HTTP/1.1\r\n"
    for head in (b"", line[:20], line + b"Host: a\r\nContent-Length: 900\r\n\r\n{\"pro"):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head)
            time.sleep(0.05)
    assert fake.complete(prompt=[1], max_tokens=2)
    assert "Traceback" not in fake.log and "failed unexpectedly" not in fake.log


# -- requests that fail


def test_a_failed_request_fails_alone(fake: Served) -> None:
    """Logits that are not finite: an error for that request, 500 or an event, while its neighbour goes on."""
    answers: list[httpx.Response] = []
    neighbour = threading.Thread(target=lambda: answers.append(fake.post("/v1/completions", prompt=[SLOW], max_tokens=20)))
    neighbour.start()
    failed = fake.post("/v1/completions", prompt=[FAIL], max_tokens=9)
    assert failed.status_code == 500 and error_of(failed)["code"] == "generation_failed"
    assert "not finite" in error_of(failed)["message"]
    events = events_of(fake.post("/v1/completions", prompt=[FAIL], max_tokens=9, stream=True))
    assert len(events) <= 3 and events[-1]["error"]["code"] == "generation_failed"
    neighbour.join()
    assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 20
    assert fake.settle()["vllm:corrupted_requests_total"] == 2


def test_one_of_many_prompts_fails(fake: Served) -> None:
    failed = fake.post("/v1/completions", prompt=[[1], [FAIL], [SLOW]], max_tokens=100)
    assert failed.status_code == 500
    fake.settle(1.0)


def test_a_full_queue(fake: Served) -> None:
    for stream in (False, True):
        refused = fake.post("/v1/completions", prompt=[REFUSE], stream=stream)
        assert refused.status_code == 503 and error_of(refused)["code"] == "queue_full" and refused.headers["retry-after"]
    assert fake.complete(prompt=[1], max_tokens=2)


@pytest.mark.serial
def test_refusals_do_not_wait_for_a_step(fake: Served) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(fake.complete, prompt=[LONG], max_tokens=2)
        time.sleep(LONG_SECONDS / 4)
        began = time.monotonic()
        assert fake.post("/v1/completions", prompt=[REFUSE]).status_code == 503
        assert time.monotonic() - began < LONG_SECONDS / 3
        answer.result()


@pytest.mark.serial
def test_headers_come_when_a_request_is_admitted(fake: Served) -> None:
    """Before the first token, so that a client knows that it is served and nobody on the way times out."""
    for path, body in (("/v1/completions", {"prompt": [LATE]}), ("/v1/completions", {"prompt": [[LATE], [LATE]], "n": 2})):
        began = time.monotonic()
        with fake.http.stream("POST", path, json={**body, "max_tokens": 2, "stream": True}) as answer:
            assert answer.status_code == 200 and time.monotonic() - began < LATE_SECONDS / 2
            first = next(answer.iter_bytes())
            assert first.startswith(b"data: ") and time.monotonic() - began > LATE_SECONDS / 2
    fake.settle(5.0)


def test_a_real_full_queue() -> None:
    with served(need(MODELS / "stories260k"), "--max-num-queued-reqs", "2", "--max-num-seqs", "1") as server:

        async def crowd() -> list[int]:
            async with httpx.AsyncClient(base_url=server.url, timeout=60, headers=PATIENT) as client:
                body = {"prompt": [1], "max_tokens": 200, "ignore_eos": True}
                answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(12)))
                return [answer.status_code for answer in answers]

        statuses = asyncio.run(crowd())
        # One runs and two wait; one or two more may come once the first have ended.
        assert set(statuses) == {200, 503} and 3 <= statuses.count(200) <= 5
        assert server.settle()["penstock:requests_refused_total"] == statuses.count(503)
        # An idle server takes any request: one is never refused for its own size.
        assert len(server.complete(prompt=[[1]] * 40, max_tokens=2)["choices"]) == 40
        assert len(server.complete(prompt=[1], n=8, max_tokens=2)["choices"]) == 8


def test_a_bug_while_taking_a_request_in(fake: Served) -> None:
    refused = fake.post("/v1/completions", prompt=[CRASH_ON_SUBMIT])
    assert refused.status_code == 500 and "ZeroDivisionError" in error_of(refused)["message"]
    assert fake.complete(prompt=[1], max_tokens=2)


# -- engines that break or hang


@pytest.mark.parametrize("how", ["killed", "broken"])
def test_an_engine_that_dies(doomed: Served, how: str) -> None:
    """Open requests get an error, new ones 503, and the server ends with status 1 and the reason."""
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda stream=stream: answers.append(
        doomed.post("/v1/completions", prompt=[SLOW], max_tokens=400, stream=stream))) for stream in (False, True)]
    for thread in threads:
        thread.start()
    while doomed.http.get("/load").json()["server_load"] < 2:
        time.sleep(0.02)
    time.sleep(0.1)
    if how == "killed":
        os.kill(doomed.engine_pid, signal.SIGKILL)
    else:
        assert doomed.post("/v1/completions", prompt=[BREAK], max_tokens=3).status_code == 503
    for thread in threads:
        thread.join(5)
    whole = next(answer for answer in answers if answer.status_code != 200)
    assert whole.status_code == 503 and error_of(whole)["code"] == "engine_dead"
    streamed = next(answer for answer in answers if answer.status_code == 200)
    assert events_of(streamed)[-1]["error"]["code"] == "engine_dead"
    assert doomed.ended(5) == 1
    assert ("SIGKILL" if how == "killed" else "RuntimeError: the step broke") in doomed.log.strip().splitlines()[-1]


def test_health_tells_of_a_stopped_and_of_a_stuck_engine(doomed: Served) -> None:
    """A process that is stopped, then goes on; then a step that never ends: /health says so after the stall timeout."""
    os.kill(doomed.engine_pid, signal.SIGSTOP)
    time.sleep(1.5)
    assert doomed.http.get("/health").status_code == 503
    os.kill(doomed.engine_pid, signal.SIGCONT)
    until = time.monotonic() + 5
    while doomed.http.get("/health").status_code != 200:
        assert time.monotonic() < until
        time.sleep(0.05)
    with pytest.raises(httpx.ReadTimeout):
        doomed.http.post("/v1/completions", json={"prompt": [STICK]}, timeout=0.2)
    # The engine does not hear that the client has left, and is not heard of either.
    time.sleep(1.5)
    sick = doomed.http.get("/health")
    assert sick.status_code == 503 and "stuck" in error_of(sick)["message"]
    assert doomed.http.get("/ready").status_code == 503 and doomed.metrics()["penstock:engine_up"] == 0
    doomed.signal()
    assert doomed.ended(3) == 1


def test_an_idle_engine_costs_next_to_nothing() -> None:
    """At most 2 % of a core for server and engine together, and health stays good."""
    with served(need(MODELS / "stories260k"), fresh=True) as server:
        server.complete(prompt=[1], max_tokens=4)
        time.sleep(0.5)
        pids = (server.process.pid, server.engine_pid)
        before, began = sum(map(cpu_seconds, pids)), time.monotonic()
        time.sleep(3)
        assert (sum(map(cpu_seconds, pids)) - before) / (time.monotonic() - began) <= 0.02
        assert server.http.get("/health").status_code == 200


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
