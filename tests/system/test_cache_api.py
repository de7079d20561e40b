"""The cache's API for users: retention, namespaces, quotas, reset, usage and metrics."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, AsyncLLM, SamplingParams, Span
from penstock.core.errors import RequestError
from penstock.core.request import PINNED, WHOLE
from tests.data import MODELS, need
from tests.system.fakes import NAME as FAKE
from tests.system.served import TEMPLATE, Served, error_of, served

ONE = SamplingParams(temperature=0, max_tokens=1)
SMALL: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory_bytes": 1 << 20, "max_num_seqs": 4, "dtype": "float32",
                         "threads": 1}
"""A cache of 800 tokens of stories260k."""


def make(**options: Any) -> LLM:
    return LLM(str(need(MODELS / "stories260k")), **{**SMALL, **options})


def tokens(seed: int, count: int = 128) -> list[int]:
    """A prompt of its own, from the first token on for the first 500 seeds."""
    return [3 + seed % 500, *random.Random(seed).choices(range(3, 512), k=count - 1)]


def ask(llm: LLM, ids: list[int], **how: Any) -> int:
    """How many tokens of a prompt were cached."""
    return llm.generate({"prompt_token_ids": ids}, ONE, use_tqdm=False, **how)[0].num_cached_tokens


def flood(llm: LLM, first: int = 100, count: int = 12, **how: Any) -> None:
    """More prompts than the cache holds."""
    for seed in range(first, first + count):
        ask(llm, tokens(seed), **how)


# -- offline


def test_a_span_outlives_a_flood() -> None:
    with make() as llm:
        ask(llm, tokens(1))
        flood(llm)
        assert ask(llm, tokens(1)) == 0, "else nothing is shown"
        llm.reset_prefix_cache()
        ask(llm, tokens(1), retention=Span(priority=PINNED, seconds=3600))
        ask(llm, tokens(2), retention=[Span(64, 90, 3600)])
        flood(llm)
        assert ask(llm, tokens(1)) == 127
        assert ask(llm, tokens(2)) == 64


def test_a_span_covers_the_answer_if_asked_to() -> None:
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    with make() as llm:
        for span, expected in ((Span(WHOLE, 90, 3600), 128 + 47), (Span(priority=90, seconds=3600), 128)):
            llm.reset_prefix_cache()
            output = llm.generate({"prompt_token_ids": tokens(1)}, params, use_tqdm=False, retention=span)[0]
            flood(llm)
            assert ask(llm, [*tokens(1), *output.outputs[0].token_ids, 5]) == expected


def test_a_low_priority_goes_first() -> None:
    with make() as llm:
        ask(llm, tokens(1), retention=Span(priority=0, seconds=3600))
        ask(llm, tokens(2))
        flood(llm, count=5)
        assert ask(llm, tokens(2)) == 127 and ask(llm, tokens(1)) < 100


def test_time_runs_out_and_begins_anew_with_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is moved, so that a slow machine changes nothing."""
    real, moved = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: real() + moved)
    with make() as llm:
        for seed in (1, 2):
            ask(llm, tokens(seed), retention=Span(priority=90, seconds=600))
        moved = 400.0
        assert ask(llm, tokens(2)) == 127
        moved = 800.0
        flood(llm)
        assert (ask(llm, tokens(1)), ask(llm, tokens(2))) == (0, 127)


def test_pins_do_not_stop_what_runs() -> None:
    """More is pinned than there is room: all requests are served, and the last pins are there."""
    with make() as llm:
        for seed in range(1, 14):
            ask(llm, tokens(seed), retention=Span(priority=PINNED, seconds=3600))
        assert ask(llm, tokens(13)) == 127 and ask(llm, tokens(1)) == 0
        llm.engine.scheduler.check()


def test_namespaces_and_lists() -> None:
    with make() as llm:
        batch = [{"prompt_token_ids": tokens(seed)} for seed in (1, 2)]
        llm.generate(batch, ONE, use_tqdm=False, cache_salt=["a", None], retention=[[Span()], None])
        assert (ask(llm, tokens(1)), ask(llm, tokens(1), cache_salt="b"), ask(llm, tokens(1), cache_salt="a")) == (0, 0, 127)
        assert ask(llm, tokens(2)) == 127
        assert llm.generate({"prompt_token_ids": tokens(2), "cache_salt": "c"}, ONE, use_tqdm=False)[0].num_cached_tokens == 0
        for how, param in (({"cache_salt": ["a"]}, "cache_salt"), ({"retention": [[Span()]]}, "retention"),
                           ({"retention": [Span(priority=200)]}, "retention.priority"), ({"retention": [5, 6]}, "retention")):
            with pytest.raises((RequestError, TypeError)) as caught:
                llm.generate(batch, ONE, use_tqdm=False, **how)
            assert getattr(caught.value, "param", param) == param


def test_marks_in_conversations() -> None:
    with make(chat_template=TEMPLATE, max_model_len=512, kv_cache_memory_bytes=3 << 19) as llm:
        book = "Once upon a time there was a little girl named Lily. She liked to play in the park. " * 3
        messages = [{"role": "system", "content": book, "cache_control": {"type": "ephemeral", "ttl": "1h"}},
                    {"role": "user", "content": "One day she saw a dog. The dog was big and it ran after her ball."}]
        length = len(llm.get_tokenizer().encode(book))
        llm.chat(messages, ONE, use_tqdm=False)
        flood(llm, count=16)
        [again] = llm.chat(messages, ONE, use_tqdm=False)
        # Contexts are kept in whole pages.
        assert length - 2 <= again.num_cached_tokens <= length + 16 < len(again.prompt_token_ids)
        assert sum(again.cached_by_tier.values()) == again.num_cached_tokens


def test_without_prefix_caching() -> None:
    with make(enable_prefix_caching=False) as llm:
        assert (ask(llm, tokens(1)), ask(llm, tokens(1))) == (0, 0)
        assert not llm.info.prefix_caching and llm.reset_prefix_cache()


def test_the_cache_is_known_by_its_weights() -> None:
    with make() as one, make(block_size=8) as other, LLM(str(need(MODELS / "babyllama-tok105")), threads=1) as third:
        assert one.info.cache_identity == other.info.cache_identity != third.info.cache_identity


def test_async() -> None:
    async def run() -> None:
        llm = AsyncLLM(str(need(MODELS / "stories260k")), **SMALL)
        await llm.start()
        try:
            async def cached(**how: Any) -> int:
                async for output in llm.generate({"prompt_token_ids": tokens(1)}, ONE, **how):
                    last = output
                return last.num_cached_tokens

            assert [await cached(), await cached(), await cached(cache_salt="x")] == [0, 127, 0]
            assert await llm.reset_prefix_cache()
            assert await cached(retention=[Span()]) == 0
        finally:
            await llm.shutdown()

    asyncio.run(run())


# -- over HTTP


FLAGS = ("--dtype", "float32", "--threads", "1", "--max-model-len", "256", "--kv-cache-memory-bytes", str(1 << 20),
         "--max-num-seqs", "4", "--chat-template", TEMPLATE)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(need(MODELS / "stories260k"), *FLAGS, "--api-key", "a,b", "--admin-api-key", "root", "--cache-tenant-share",
                "0.5", "--kv-events-config", json.dumps({"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*",
                                                         "replay_endpoint": "tcp://127.0.0.1:*", "topic": "kv@pod@stories"}),
                ) as started:
        # Figures need a key too; `send` names its own.
        started.http.headers["Authorization"] = "Bearer a"
        yield started


def send(server: Served, prompt: Any, key: str = "a", path: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    answer = server.http.post(path, json={"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields},
                              headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cached(answer: dict[str, Any]) -> int:
    details = answer["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == sum(details["cached_tokens_by_tier"].values())
    found: int = details["cached_tokens"]
    return found


def reset(server: Served, key: str = "root") -> Any:
    return server.http.post("/reset_prefix_cache", json={}, headers={"Authorization": f"Bearer {key}"})


def test_usage(server: Served) -> None:
    reset(server)
    assert cached(send(server, tokens(1))) == 0
    again = send(server, tokens(1))
    assert again["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 127, "audio_tokens": 0, "cached_tokens_by_tier": {"device": 127}}
    several = send(server, [tokens(1), tokens(2)], n=2)
    assert cached(several) == 127, "each prompt counts once"
    answer = server.http.post("/v1/completions", headers={"Authorization": "Bearer a"}, json={
        "prompt": tokens(1), "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}})
    last = json.loads(answer.text.split("data: ")[-2])
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 127


@pytest.mark.parametrize(("fields", "expected"), [
    ({}, 0), ({"cache_control": {"type": "ephemeral"}}, 127), ({"prompt_cache_retention": "24h"}, 127),
    ({"prompt_cache_options": {"mode": "implicit"}}, 127), ({"prompt_cache_options": {"ttl": "2h"}}, 127),
    ({"prompt_cache_retention": "in_memory"}, 0), ({"cache_retention": [{"upto": 32, "priority": 90, "ttl": "1h"}]}, 32),
    ({"cache_control": {"type": "ephemeral", "priority": 0}}, 0), ({"cache_retention": [{"upto": "all"}]}, 127)])
def test_retention(server: Served, fields: dict[str, Any], expected: int) -> None:
    reset(server)
    send(server, tokens(1), **fields)
    for seed in range(100, 112):
        send(server, tokens(seed))
    assert cached(send(server, tokens(1))) == expected


def test_chat_marks(server: Served) -> None:
    reset(server)
    parts = [{"type": "text", "text": "Once upon a time there was a little girl. " * 5, "cache_control": {"type": "ephemeral"}},
             {"type": "text", "text": "One day she saw a big red ball in the park. She was very happy."}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
    headers = {"Authorization": "Bearer a"}
    first = server.http.post("/v1/chat/completions", json=body, headers=headers).json()
    for seed in range(100, 112):
        send(server, tokens(seed))
    marked = len(server.http.post("/tokenize", json={"prompt": parts[0]["text"]}, headers=headers).json()["tokens"])
    again = cached(server.http.post("/v1/chat/completions", json=body, headers=headers).json())
    assert marked - 2 <= again <= marked + 16 < first["usage"]["prompt_tokens"]


def test_a_tenant_has_a_quota(server: Served) -> None:
    """Half of 800 tokens: a flood of pins by one tenant leaves the other's prompts where they are."""
    reset(server)
    for seed in (1, 2):
        send(server, tokens(seed), key="b")
    for seed in range(100, 112):
        send(server, tokens(seed), cache_control={"type": "ephemeral", "priority": PINNED})
    assert [cached(send(server, tokens(seed), key="b")) for seed in (1, 2)] == [127, 127]
    assert cached(send(server, tokens(111))) == 127


def test_reset_is_for_the_operator(server: Served) -> None:
    send(server, tokens(1))
    for key, status, code in (("a", 403, "admin_key_needed"), ("x", 401, "invalid_api_key")):
        refused = reset(server, key)
        assert refused.status_code == status and error_of(refused)["code"] == code
    assert cached(send(server, tokens(1))) == 127
    assert reset(server).json() == {"success": True}
    assert cached(send(server, tokens(1))) == 0


def test_what_the_server_says_of_itself(server: Served) -> None:
    info = server.http.get("/server_info", headers={"Authorization": "Bearer a"}).json()
    assert info["page_size"] == 16 and info["kv_events"]["topic"] == "kv@pod@stories"
    facts = info["cache"]
    assert facts["prefix_caching"] and facts["isolated"] and facts["tenant_share"] == 0.5
    assert re.fullmatch("[0-9a-f]{32}", facts["identity"]) and [tier["name"] for tier in facts["tiers"]] == ["device"]
    [source] = server.http.get("/kv_event_sources", headers={"Authorization": "Bearer a"}).json()
    assert source["dp_rank"] == 0 and source["block_size"] == 16 and source["schema_version"] == 1
    assert source["endpoint"].startswith("tcp://127.0.0.1:") and source["replay_endpoint"] != source["endpoint"]


def of_device(server: Served) -> dict[str, float]:
    """The device's figures among the metrics, by the ends of their names."""
    text = server.http.get("/metrics").text
    return {name: float(value) for name, value in re.findall(r'^penstock:cache_(\w+)\{.*tier="device".*\} (\S+)$', text, re.M)}


def test_metrics(server: Served) -> None:
    reset(server)
    before, kept = server.settle(), of_device(server)
    assert kept["cached_pages"] == 0
    for seed in (1, 1, 2):
        send(server, tokens(seed))
    for seed in range(100, 112):
        send(server, tokens(seed))
    after = server.settle()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["vllm:prefix_cache_queries_total"] == 15 * 128
    assert grown["vllm:prefix_cache_hits_total"] == grown["vllm:prompt_tokens_cached_total"] == 127
    assert grown["penstock:prefix_cache_misses_total"] == 15 * 128 - 127
    text = server.http.get("/metrics").text
    assert 'vllm:prompt_tokens_by_source_total{engine="0",model_name="stories",source="local_cache_hit"}' in text
    assert re.search(r'vllm:cache_config_info\{.*enable_prefix_caching="True"', text)
    figures = of_device(server)
    stored, evicted = (figures[name] - kept[name] for name in ("stored_pages_total", "evicted_pages_total"))
    assert figures["used_bytes"] <= figures["capacity_bytes"] <= 1 << 20
    assert evicted > 0 and figures["cached_pages"] == stored - evicted > 20
    assert figures["hit_tokens_total"] == after["vllm:prefix_cache_hits_total"]


def test_one_key_or_none_is_the_operators_own() -> None:
    with served(need(MODELS / "stories260k"), engine=FAKE) as server:
        assert [server.post("/reset_prefix_cache").json()["success"] for _ in range(3)] == [True, True, False]
        assert server.http.get("/kv_event_sources").json() == []
        names = [tier["name"] for tier in server.http.get("/server_info").json()["cache"]["tiers"]]
        assert names in ([], ["device", "host"])
    with served(need(MODELS / "stories260k"), "--api-key", "only", engine=FAKE) as server:
        assert server.post("/reset_prefix_cache").status_code == 401
        assert reset(server, "only").json() == {"success": True}


def test_a_tenants_pages_outlive_the_server(tmp_path: Path) -> None:
    """The salts are the same after a restart, and the answer says from where the pages came."""
    flags = (*FLAGS, "--api-key", "a,b", "--cache-disk", str(tmp_path / "pages"), "--cache-load", "always",
             "--cache-host-bytes", "16M")
    with served(need(MODELS / "stories260k"), *flags) as first:
        before = send(first, tokens(1), logprobs=1)
        first.signal()
        assert first.ended() == 0
    with served(need(MODELS / "stories260k"), *flags) as second:
        assert cached(send(second, tokens(1), key="b")) == 0
        again = send(second, tokens(1), logprobs=1)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"] == {"disk": 112}
        assert again["choices"] == before["choices"]
        assert {tier["name"] for tier in second.http.get("/server_info", headers={"Authorization": "Bearer a"}).json()[
            "cache"]["tiers"]} == {"device", "host", "disk"}
        # An engine that still writes pages tells its figures every tenth of a second.
        figures = (r'vllm:prompt_tokens_cached_by_source_total\{.*source="disk"\} 112.0',
                   r"vllm:external_prefix_cache_hits_total\{.*\} 112.0")
        until = time.monotonic() + 5
        while not all(re.search(figure, second.http.get("/metrics", headers={"Authorization": "Bearer a"}).text)
                      for figure in figures):
            assert time.monotonic() < until
            time.sleep(0.05)
