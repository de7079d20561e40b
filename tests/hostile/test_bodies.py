"""Generated bodies and the known bad ones: never a 5xx, no exit, and /health stays quick while they are worked on."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from penstock.engine.work import THREADS
from tests.data import MODELS, need
from tests.hostile.bodies import cases
from tests.hostile.forms import forms
from tests.system.served import TEMPLATE, Served, error_of

pytestmark = pytest.mark.xdist_group("stories")

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"

HEALTH_SECONDS = 1.0
"""The longest that /health may take on a machine that does other things besides; `make hostile` measures closely. A loop that
does such work itself does not answer for 5 to 96 s."""

BUSY = frozenset({503})
"""Refusals that say that something is full are no failures."""


@pytest.fixture(scope="module")
def server(shared: Callable[..., Served]) -> Iterator[Served]:
    server = shared(need(MODELS / "stories260k"), "--chat-template", TEMPLATE)
    yield server
    assert server.complete(prompt="Once", max_tokens=4)["usage"]["completion_tokens"] == 4
    assert server.settle()["penstock:pages_used"] == 0
    assert "Traceback" not in server.log, server.log


class Health:
    """Asks /health all the time, in a thread."""

    def __init__(self, server: Served) -> None:
        self.seconds: list[float] = []
        self._url = server.url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=30) as http:
            while not self._stop.is_set():
                began = time.perf_counter()
                assert http.get("/health").status_code == 200
                self.seconds.append(time.perf_counter() - began)
                time.sleep(0.005)

    def __enter__(self) -> Health:
        self._thread.start()
        while not self.seconds:
            time.sleep(0.001)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    @property
    def quick(self) -> bool:
        return max(self.seconds) < HEALTH_SECONDS


def send(server: Served, path: str, body: bytes, kind: str = "application/json") -> httpx.Response:
    return server.http.post(path, content=body, headers={b"Content-Type": kind.encode("latin-1")})


@pytest.mark.serial
@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_generated_bodies(server: Served, every: int) -> None:
    """Each list and string of the schema at its limit, one above, and much more; here up to 60 kB. `make test` sends one or two
    of these three, by turns."""
    document = server.http.get("/openapi.json").json()
    found = list(cases(document, most_bytes=60_000))
    for kind in ("messages", "prompt"):
        assert any(case.path == "/invocations" and kind in case.name for case in found)
    first = {CHAT, COMPLETIONS, TOKENIZE, "/detokenize"}
    assert len(found) > 1000 and {case.path for case in found} > first | {"/v1/messages", "/v1/responses", "/api/chat",
                                                                          "/pooling"}
    # Routes that become the chat endpoint's requests are sampled; `make hostile` sends all.
    turns = {path: itertools.count() for path in first}
    found = [case for place, case in enumerate(found)
             if (next(turns[case.path]) % every == 0 if case.path in first else place % 12 == 0)]
    with Health(server) as health:
        for case in found:
            answer = send(server, case.path, case.body)
            assert answer.status_code < 500 or answer.status_code in BUSY, f"{case.path} {case.name}: {answer.text[:300]}"
            if answer.status_code >= 400:
                assert "error" in answer.json()
                if case.path in first:
                    error_of(answer)
    assert sum(seconds > HEALTH_SECONDS for seconds in health.seconds) <= 2, sorted(health.seconds)[-5:]


@pytest.mark.serial
def test_uploads(server: Served) -> None:
    """Forms of up to some megabytes; what is refused is named, and nothing of it is stored."""

    def uploaded() -> set[str]:
        """Without the answers of batches, which other tests' bodies may have begun."""
        return {file["id"] for file in server.http.get("/v1/files").json()["data"] if file["purpose"] == "batch"}

    stored, before = set(), uploaded()
    with Health(server) as health:
        for case in forms():
            answer = send(server, case.path, case.body, case.kind)
            assert answer.status_code in (200, 400, 413, 415), f"{case.name}: {answer.status_code} {answer.text[:300]}"
            if answer.status_code >= 400:
                assert len(error_of(answer)["message"]) < 1000
            else:
                stored.add(answer.json()["id"])
                assert not case.name.endswith("x 100000"), case.name
    assert health.quick, sorted(health.seconds)[-3:]
    assert stored and uploaded() - before == stored


def test_queries(server: Served) -> None:
    """Numbers that are none, or too long for Python to read, in the query of every route that is read."""
    document = server.http.get("/openapi.json").json()
    paths = [path.replace("{", "").replace("}", "") for path, methods in document["paths"].items()
             if "get" in methods and path not in ("/engine/events", "/metrics")]
    assert len(paths) > 20
    for value in ("\u00b2", "9" * 5000, "-5", "", "1e9", "\x00", "\u0663"):
        asked = dict.fromkeys(("limit", "after", "order", "purpose", "level", "tags", "before_id", "after_id"), value)
        for path in paths:
            for query in (asked, {"limit": value}, {"stream": "true", "starting_after": value}, {"model": f"stories@{value}"}):
                answer = server.http.get(path, params=query)
                assert answer.status_code < 500, f"{path} {query}: {answer.text[:300]}"


MARKED = {"role": "user", "content": [{"type": "text", "text": "word " * 20, "cache_control": {"type": "ephemeral"}}]}
KNOWN: dict[str, tuple[str, dict[str, Any], int]] = {
    "marks": (CHAT, {"messages": [MARKED] * 2000}, 400),
    "empty messages": (CHAT, {"messages": [{"role": "user", "content": ""}] * 400_000}, 413),
    "few empty messages": (CHAT, {"messages": [{"role": "user", "content": ""}] * 16_000}, 200),
    "bad words": (COMPLETIONS, {"prompt": "Once", "bad_words": [f"{'word ' * 190}{i}" for i in range(1000)]}, 400),
    "bad words of many": (COMPLETIONS, {"prompt": "Once", "n": 64, "bad_words": [f"some words {i}" for i in range(1000)],
                                        "max_tokens": 4}, 400),
    "n and logprobs": (COMPLETIONS, {"prompt": "Once", "n": 128, "logprobs": 20, "max_tokens": 100, "ignore_eos": True}, 200),
    "echo with logprobs": (COMPLETIONS, {"prompt": [[3 + i] * 100 for i in range(64)], "echo": True, "logprobs": 5,
                                         "max_tokens": 1}, 200),
    "tokenize much": (TOKENIZE, {"prompt": "many words " * 90_000, "return_token_strs": True}, 200),
    "tokenize too much": (TOKENIZE, {"prompt": "many words " * 1_000_000, "return_token_strs": True}, 400),
    "too long": (COMPLETIONS, {"prompt": "many words " * 1_000_000}, 400),
    "nested kwargs": (CHAT, {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": 0}}, 400),
    "scores": (COMPLETIONS, {"prompt": ["Once"] * 900, "logprobs": 20, "max_tokens": 1}, 400),
    "answers": (COMPLETIONS, {"prompt": ["Once"] * 100, "n": 100, "max_tokens": 1}, 400),
}


def nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.serial
@pytest.mark.parametrize("name", KNOWN)
def test_known_bodies(server: Served, name: str) -> None:
    path, body, status = KNOWN[name]
    if name == "nested kwargs":
        body = {**body, "chat_template_kwargs": {"a": nested(700)}}
    data = json.dumps(body).encode()
    with Health(server) as health:
        answer = send(server, path, data)
    assert answer.status_code == status, answer.text[:300]
    assert health.quick, sorted(health.seconds)[-3:]


@pytest.mark.parametrize("field", ["tools", "documents"])
@pytest.mark.parametrize("depth", [600, 900])
def test_nesting_is_a_bad_request(server: Served, field: str, depth: int) -> None:
    deep = {"type": "function", "function": {"name": "f", "parameters": {"a": nested(depth)}}} if field == "tools" \
        else {"a": nested(depth)}
    answer = send(server, CHAT, json.dumps({"messages": [{"role": "user", "content": "a"}], field: [deep]}).encode())
    assert answer.status_code == 400 and "--max-json-depth" in error_of(answer)["message"]


def test_large_numbers_are_bad_requests(server: Served) -> None:
    for body in ({"top_k": 2**64}, {"temperature": 1e46, "min_tokens": 2}, {"seed": 2**64}, {"min_tokens": 2**64},
                 {"max_tokens": 2**70}, {"truncate_prompt_tokens": 2**64}, {"logit_bias": {str(2**64): 1}},
                 {"stop_token_ids": [2**64]}, {"cache_retention": [{"upto": 2**64}]}, {"priority": -(2**31)},
                 {"top_p": 1e-300}, {"min_p": 1e-300}, {"repetition_penalty": 0.01, "presence_penalty": -2}):
        answer = server.post(COMPLETIONS, **{"prompt": "Once", "max_tokens": 3, **body})
        assert answer.status_code in (200, 400, 403), (body, answer.text)
    server.settle()


@pytest.mark.serial
def test_sent_and_hung_up(server: Served) -> None:
    """Twenty long requests are sent and given up; a short one behind them does not wait for their work, and it is not done."""
    body = json.dumps({"prompt": "many words " * 90_000, "return_token_strs": True}).encode()

    async def run() -> float:
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=httpx.Limits(max_connections=50)) as client:
            async def give_up() -> None:
                try:
                    async with asyncio.timeout(0.5):
                        await client.post(TOKENIZE, content=body, headers={"Content-Type": "application/json"})
                except TimeoutError:
                    pass

            await asyncio.gather(*(give_up() for _ in range(20)))
            began = time.monotonic()
            answer = await client.post(COMPLETIONS, json={"prompt": "word " * 80, "max_tokens": 1})
            assert answer.status_code == 200
            return time.monotonic() - began

    def left() -> int:
        return sum("POST /tokenize no answer" in line for line in server.log.splitlines())

    before = left()
    with Health(server) as health:
        seconds = asyncio.run(run())
    assert seconds < 2 and health.quick, (seconds, sorted(health.seconds)[-3:])
    # Workers may end the jobs that they have begun; each of the twenty takes more than half a second.
    until = time.monotonic() + 3
    while (given_up := left() - before) < 20 - THREADS and time.monotonic() < until:
        time.sleep(0.1)
    assert given_up >= 20 - THREADS, "clients have left, but their work is done"
