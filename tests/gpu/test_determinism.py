"""The batch-invariant mode: a request's log probabilities have the same bits in any company, chunk, and after preemption."""

from __future__ import annotations

import random
from typing import Any

import pytest

from penstock import canary
from penstock.core.request import Update
from tests.gpu.conftest import engine, updates

Lines = list[tuple[int, float]]


def _lines(prompts: list[list[int]], output: int, **options: Any) -> tuple[list[Lines], int]:
    """(token, log probability) at every position of each continuation, and how often a sequence was preempted."""
    with engine(model=canary.NAME, batch_invariant=True, **options) as made:
        found = updates(made, prompts, output, logprobs=0)
        preemptions = made.stats().preemptions
    return [_scored(mine) for mine in found], preemptions


def _scored(mine: list[Update]) -> Lines:
    assert all(update.logprobs is not None for update in mine)
    return [(update.token_ids[0], update.logprobs[0].logprobs[0]) for update in mine if update.logprobs]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(10, 4000) for _ in range(rng.choice((1, 7, 33, 90, 200, 700)))] for _ in range(256)]


@pytest.fixture(scope="module")
def alone(prompts: list[list[int]]) -> list[Lines]:
    return _lines(prompts[:12], 24, max_num_seqs=1, enforce_eager=True)[0]


@pytest.mark.parametrize("batch", [2, 12, 64, 256])
def test_company(batch: int, prompts: list[list[int]], alone: list[Lines]) -> None:
    found, _ = _lines(prompts[:batch], 24)
    assert found[:12] == alone[:batch]


@pytest.mark.parametrize("chunk", [64, 300])
def test_chunks(chunk: int, prompts: list[list[int]], alone: list[Lines]) -> None:
    found, _ = _lines(prompts[:12], 24, max_num_batched_tokens=chunk, max_num_seqs=12)
    assert found == alone


def test_preemption(prompts: list[list[int]], alone: list[Lines]) -> None:
    # Half of what the twelve need at once.
    found, preemptions = _lines(prompts[:12], 24, max_num_seqs=12, max_model_len=1024, kv_cache_memory_bytes=3 << 20)
    assert preemptions > 0
    assert found == alone


def test_a_cached_prefix(prompts: list[list[int]], alone: list[Lines]) -> None:
    """The second time, the prompt's entries are there already."""
    with engine(model=canary.NAME, batch_invariant=True) as made:
        updates(made, prompts[:12], 24)
        found = updates(made, prompts[:12], 24, logprobs=0)
        assert made.stats().cached_tokens > 0
    assert [_scored(mine) for mine in found] == alone
