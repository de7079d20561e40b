"""Limits on the raw body and on what it asks for: counted without decoding, refused by name."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from penstock.config.schema import ServerOptions
from penstock.core.errors import RequestError
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.server.limits import Limits, measure


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    return 0


def values_of(value: Any) -> int:
    """Containers, and entries after the first of each."""
    if not isinstance(value, dict | list):
        return 0
    entries = list(value.values()) if isinstance(value, dict) else value
    return 1 + max(0, len(entries) - 1) + sum(map(values_of, entries))


def made_up(rng: random.Random, levels: int) -> Any:
    kind = rng.randrange(5) if levels else rng.randrange(2)
    text = "".join(rng.choice('ab"\\[]{},:\n\u00e9\U0001f600') for _ in range(rng.randrange(30)))
    if kind < 2:
        return text if kind else rng.randrange(1000)
    if kind == 2:
        return {f"{text}{i}": made_up(rng, levels - 1) for i in range(rng.randrange(4))}
    return [made_up(rng, levels - 1) for _ in range(rng.randrange(5))]


@pytest.mark.parametrize("seed", range(40))
def test_measured_as_decoded(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Depth and values of random JSON with quotes, backslashes and brackets in its strings, cut at every place."""
    rng = random.Random(seed)
    value = [made_up(rng, 6) for _ in range(8)]
    data = json.dumps(value, ensure_ascii=bool(seed % 2)).encode()
    for piece in (1, 2, 3, 7, 64 << 10):
        monkeypatch.setattr("penstock.server.limits._PIECE", piece)
        assert measure(data, 10**9, 10**9) == (depth_of(value), values_of(value))


def test_refused_before_it_is_decoded() -> None:
    limits = Limits(ServerOptions(max_json_depth=64, max_json_values=5000))
    limits.check_json(b"[" * 64 + b"]" * 64)
    for data, flag in ((b"[" * 65 + b"]" * 65, "--max-json-depth"), (b'{"a":' * 100_000, "--max-json-depth"),
                       (b"[" + b"1," * 5000 + b"1]", "--max-json-values"), (b"[" + b"{}," * 5000 + b"1]", "--max-json-values")):
        with pytest.raises(RequestError, match=flag) as refused:
            limits.check_json(data)
        assert refused.value.status in (400, 413)
    # Brackets in strings are text, and bodies that are no JSON are the decoder's.
    limits.check_json(json.dumps({"prompt": "[{" * 9999 + '\\"' * 99}).encode())
    limits.check_json(b"]" * 99999)


def test_what_may_be_asked_for() -> None:
    limits = Limits(ServerOptions(max_request_sequences=100, max_request_scores=1000, max_tenant_tokens=50))
    limits.work(10, SamplingParams(n=10))
    for prompts, params, flag in ((11, SamplingParams(n=10), "--max-request-sequences"),
                                  (5, SamplingParams(beam_width=21, n=1), "--max-request-sequences"),
                                  (1, SamplingParams(n=64, logprobs=20), "--max-request-scores"),
                                  (99, SamplingParams(prompt_logprobs=20), "--max-request-scores")):
        with pytest.raises(RequestError, match=flag):
            limits.work(prompts, params)
    request = Request("a", [1] * 40, SamplingParams())
    limits.check_tenant(0, [request, request])
    limits.check_tenant(10, [request])
    with pytest.raises(RequestError, match="--max-tenant-tokens") as refused:
        limits.check_tenant(11, [request])
    assert refused.value.status == 429


def test_bodies_that_arrive_are_counted_together() -> None:
    limits = Limits(ServerOptions(max_body_bytes=200_000, max_receiving_bytes=300_000))
    with limits.receiving() as one, limits.receiving() as two:
        one(200_000)
        with pytest.raises(RequestError, match="--max-body-bytes"):
            one(1)
        two(90_000)
        with pytest.raises(RequestError, match="--max-receiving-bytes") as refused:
            two(30_000)
        assert refused.value.status == 503
        # A short body is always taken.
        with limits.receiving() as three:
            three(1000)
    assert limits.body_bytes == 0
