"""The server as a whole: golden outputs through HTTP, its own routes, its keys, its errors, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.data import MODELS, TRAINED, need
from tests.sampling import sampled
from tests.system.fakes import NAME as FAKE, SLOW
from tests.system.served import NAME, PATIENT, Served, error_of, served

STORIES = MODELS / "stories260k"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(need(STORIES), "--max-body-bytes", "100000", "--trust-request-chat-template") as server:
        yield server


# -- golden outputs


def golden_body(case: dict[str, Any]) -> dict[str, Any]:
    return {"model": NAME, "prompt": case["prompt_ids"], "max_tokens": len(case["greedy_ids"]), "temperature": 0,
            "ignore_eos": True, "logprobs": 1, "return_token_ids": True}


def check_golden(case: dict[str, Any], answer: dict[str, Any]) -> None:
    choice = answer["choices"][0]
    assert choice["token_ids"] == case["greedy_ids"]
    worst = max(abs(a - b) for a, b in zip(choice["logprobs"]["token_logprobs"], case["logprobs"], strict=True))
    assert worst < 1e-3, f"a log probability is off by {worst}"


@pytest.mark.parametrize("model", sampled(TRAINED, len(TRAINED)))
def test_golden(model: str) -> None:
    """The trained models' greedy outputs, ids exactly and log probabilities within 1e-3: alone, then with 32 neighbours."""
    cases = json.loads((need(MODELS / model) / "greedy_golden.json").read_text())["cases"]
    with served(MODELS / model) as server:
        for case in cases:
            check_golden(case, server.complete(**golden_body(case)))
        asyncio.run(golden_in_a_crowd(server, cases))


async def golden_in_a_crowd(server: Served, cases: list[dict[str, Any]]) -> None:
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits, headers=PATIENT) as client:

        async def neighbour(number: int) -> None:
            body = {"prompt": [1] + [5 + number] * number, "max_tokens": 50 + 2 * number, "temperature": 1.0, "seed": number}
            (await client.post("/v1/completions", json=body)).raise_for_status()

        async def golden(case: dict[str, Any]) -> None:
            answer = await client.post("/v1/completions", json=golden_body(case))
            check_golden(case, answer.json())

        await asyncio.gather(*(neighbour(number) for number in range(32)), *map(golden, cases))


# -- its own routes


def test_routes_of_operators(server: Served) -> None:
    for path in ("/health", "/ready", "/ping", "/version", "/load", "/v1/models"):
        assert server.http.get(path).status_code == 200, path
    assert server.http.post("/ping").status_code == 200
    assert server.http.get("/version").json()["version"]
    assert server.http.get("/openapi.json").json()["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    assert "KV cache" in server.log and "ready at http://127.0.0.1:" in server.log


def test_metrics(server: Served) -> None:
    before = server.settle()
    server.complete(prompt=[1, 403], max_tokens=5, n=2)
    after = server.settle()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["vllm:prompt_tokens_total"] == 2 and grown["vllm:generation_tokens_total"] == 10
    assert grown["vllm:request_success_total{length}"] == 2
    assert grown["vllm:time_to_first_token_seconds_count"] == 2 == grown["vllm:e2e_request_latency_seconds_count"]
    assert grown["vllm:iteration_tokens_total_sum"] == 12 and grown["vllm:iteration_tokens_total_count"] >= 5
    assert grown["vllm:request_num_preemptions_count"] == 2 and grown["vllm:request_num_preemptions_sum"] == 0
    assert grown["vllm:inter_token_latency_seconds_count"] == 8 and grown["vllm:request_queue_time_seconds_count"] == 2
    assert after["penstock:pages_used"] == 0 < after["penstock:pages_total"]
    assert grown["penstock:worker_seconds_total"] >= grown["penstock:kernel_seconds_total"] > 0
    text = server.http.get("/metrics").text
    for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:num_preemptions_total",
                 "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:request_prompt_tokens_bucket",
                 "vllm:request_time_per_output_token_seconds_bucket", "vllm:request_generation_tokens_bucket"):
        assert f'{name}{{' in text and f'model_name="{NAME}"' in text
    assert 'vllm:cache_config_info{' in text


def test_request_ids_are_echoed(server: Served) -> None:
    answer = server.http.post("/v1/completions", json={"prompt": [1], "max_tokens": 1}, headers={"X-Request-Id": "mine-7"})
    assert answer.headers["x-request-id"] == "mine-7" and answer.json()["id"] == "cmpl-mine-7"
    assert len(server.http.get("/nope").headers["x-request-id"]) == 32


def test_keys() -> None:
    with served(need(STORIES), "--api-key", "first", environment={"PENSTOCK_API_KEY": "second"}, engine=FAKE) as server:
        for path in ("/health", "/ready", "/ping"):
            assert server.http.get(path).status_code == 200, path
        for path in ("/v1/models", "/v1/nope", "/other", "/metrics", "/version", "/load"):
            refused = server.http.get(path)
            assert refused.status_code == 401 and error_of(refused)["code"] == "invalid_api_key"
        body = {"prompt": [1], "max_tokens": 2}
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            assert server.http.post(path, json=body).status_code == 401
        for header in ("Bearer nope", "Bearer", "first", "Basic first", "Bearer first2"):
            assert server.http.post("/v1/completions", json=body, headers={"Authorization": header}).status_code == 401, header
        for key in ("first", "second"):
            assert server.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_large_bodies(server: Served) -> None:
    small = server.http.post("/v1/completions", json={"prompt": "x" * 200_000})
    assert small.status_code == 413 and error_of(small)["code"] == "request_too_large"

    def without_end() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(50):
            yield b"x" * 10_000

    chunked = server.http.post("/v1/completions", content=without_end(), headers={"Content-Type": "application/json"})
    assert chunked.status_code == 413 and "100,000" in error_of(chunked)["message"]


def test_browsers_of_other_origins() -> None:
    with served(need(STORIES), "--allowed-origins", "http://good.example", "--api-key", "k", engine=FAKE) as server:

        def preflight(origin: str) -> httpx.Response:
            return server.http.options("/v1/completions", headers={
                "Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"})

        assert preflight("http://good.example").headers["access-control-allow-origin"] == "http://good.example"
        assert "access-control-allow-origin" not in preflight("http://evil.example").headers


def test_templates_of_requests(server: Served) -> None:
    """A model without a template; one that the request brings, if the server trusts its clients; one that refuses or breaks."""

    def chat(**more: Any) -> httpx.Response:
        return server.post("/v1/chat/completions", messages=[{"role": "user", "content": "Once"}], max_tokens=2, **more)

    assert chat().status_code == 400 and error_of(chat())["code"] == "no_chat_template"
    assert chat(chat_template="{{ messages[0].content }} upon").json()["usage"]["completion_tokens"] == 2
    for template, words in (("{{ raise_exception('roles must alternate') }}", "roles must alternate"), ("{% if %}", "line 1"),
                            ("{{ messages[7].content.a }}", "no element 7"), ("{{ 1 / 0 }}", "ZeroDivisionError")):
        refused = chat(chat_template=template)
        assert refused.status_code == 400 and words in error_of(refused)["message"], refused.text


# -- how it starts and ends


def run_to_the_end(*arguments: str, engine: str | None = None) -> tuple[int, str]:
    server = Served(STORIES if engine else arguments[0], *arguments[1:], wait=False, engine=engine)
    try:
        return server.ended(60), server.log
    finally:
        server.stop()


@pytest.mark.parametrize(("arguments", "reason"), [
    (("/no/such/model",), "no folder"), ((str(STORIES), "--max-model-len", "100000"), "512"),
    ((str(STORIES), "--host", "999.1.1.1"), "cannot listen"), ((str(STORIES), "--chat-template", "nope"), "--chat-template"),
    ((str(STORIES), "--port", "99999"), "65535"),
])
def test_a_start_that_fails(arguments: tuple[str, ...], reason: str) -> None:
    """One line with the reason, status 1, no trace."""
    need(STORIES)
    status, log = run_to_the_end(*arguments)
    assert status == 1 and "Traceback" not in log, log
    last = log.strip().splitlines()[-1]
    assert last.startswith("penstock: ") and reason in last, log


def test_a_start_that_the_engine_refuses() -> None:
    need(STORIES)
    status, log = run_to_the_end("", "--seed", "13", engine=FAKE)
    assert status == 1 and "take another" in log and "Traceback" not in log
    status, log = run_to_the_end("", "--seed", "14", engine=FAKE)
    assert status == 1 and "ValueError: a bug at start" in log.strip().splitlines()[-1]


def test_probes_while_loading() -> None:
    server = Served(need(STORIES), wait=False, fresh=True)
    try:
        # It listens before it loads, on a port that it prints only when it is ready; ask the system for it.
        answer = ask_early(server)
        assert answer is None or (answer.status_code == 503 and "loading" in error_of(answer)["message"])
        server.wait_ready()
        assert server.http.get("/ready").status_code == 200
    finally:
        server.stop()


def ask_early(server: Served) -> httpx.Response | None:
    for _ in range(400):
        listening = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=False).stdout
        for line in listening.splitlines():
            if f"pid={server.process.pid}," in line:
                return httpx.get(f"http://{line.split()[3]}/ready")
        if "ready at" in server.log:
            return None
        time.sleep(0.02)
    return None


def handles(server: Served, number: int) -> bool:
    """Whether the process has a handler of a signal, which ends it with another status before."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def test_a_signal_while_loading() -> None:
    server = Served(need(STORIES), wait=False, fresh=True)
    try:
        wait_for(lambda: "loading" in server.log and handles(server, signal.SIGTERM))
        server.signal()
        assert server.ended(20) == 0, server.log
        assert "Traceback" not in server.log
    finally:
        server.stop()


def stream_in_a_thread(server: Served, tokens: int, lines: list[str]) -> threading.Thread:
    def read() -> None:
        body = {"prompt": [SLOW], "max_tokens": tokens, "stream": True, "ignore_eos": True}
        with contextlib.suppress(httpx.TransportError), \
                httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            lines.extend(line for line in answer.iter_lines() if line)

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def wait_for(condition: Any, seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.02)


def test_a_drain_finishes_what_runs() -> None:
    """SIGTERM: running requests finish, new ones are refused with 503, then status 0."""
    with served(need(STORIES), engine=FAKE) as server:
        lines: list[str] = []
        thread = stream_in_a_thread(server, 50, lines)
        wait_for(lambda: server.http.get("/load").json()["server_load"])
        server.signal()
        wait_for(lambda: server.http.get("/ready").status_code == 503)
        refused = server.post("/v1/completions", prompt=[1], max_tokens=1)
        assert refused.status_code == 503 and error_of(refused)["code"] == "shutting_down" and refused.headers["retry-after"]
        thread.join()
        assert lines[-1] == "data: [DONE]" and '"length"' in lines[-2] and len(lines) == 51
        assert server.ended() == 0


def test_a_drain_has_an_end() -> None:
    """Requests that do not finish in time get an error; the status is 0 all the same."""
    with served(need(STORIES), "--shutdown-timeout", "0.3", engine=FAKE) as server:
        lines: list[str] = []
        thread = stream_in_a_thread(server, 500, lines)
        wait_for(lambda: server.http.get("/load").json()["server_load"])
        began = time.monotonic()
        server.signal(signal.SIGINT)
        assert server.ended() == 0 and time.monotonic() - began < 5
        thread.join()
        assert "shutting_down" in lines[-2]


@pytest.mark.serial
def test_a_second_signal_ends_at_once() -> None:
    with served(need(STORIES), engine=FAKE, fresh=True) as server:
        engine = server.engine_pid
        lines: list[str] = []
        thread = stream_in_a_thread(server, 500, lines)
        wait_for(lambda: server.http.get("/load").json()["server_load"])
        server.signal()
        time.sleep(0.2)
        began = time.monotonic()
        server.signal()
        assert server.ended() == 2 and time.monotonic() - began < 1
        wait_for(lambda: not alive(engine))
        thread.join()


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_engine_goes_when_its_parent_does() -> None:
    with served(need(STORIES), engine=FAKE, fresh=True) as server:
        engine = server.engine_pid
        server.process.kill()
        wait_for(lambda: not alive(engine))
