"""Policies: what each would rather keep, and their hits on a real trace beside the best possible."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from penstock.cache.eviction import POLICIES, Adaptive
from tests.data import DATA, need
from tests.unit.cache.test_sharing import _cache, _compute, _find


@pytest.fixture(scope="module")
def replay() -> ModuleType:
    """bench/cache_replay.py."""
    path = Path(__file__).resolve().parents[3] / "bench" / "cache_replay.py"
    spec = importlib.util.spec_from_file_location("cache_replay", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cache_replay"] = module
    spec.loader.exec_module(module)
    return module


def test_hits_on_a_real_trace_lie_between_lru_and_belady(replay: ModuleType) -> None:
    whole = replay.read(need(DATA / "traces" / "mooncake_synthetic.jsonl"), 16, 0, 0)
    trace = whole._replace(turns=whole.turns[:1500])
    named = replay.pages(trace)
    working_set = len({name for names, _ in named for name in names})
    for share in (16, 4, 2):
        capacity = working_set // share
        hits = {policy: replay.replay(trace, capacity, policy) for policy in POLICIES}
        assert 0 < hits["lru"] <= hits["adaptive"] and max(hits.values()) <= replay.belady(named, capacity, 1), hits
    seen: set[int] = set()
    possible = 0
    for turn in trace.turns:
        for block in turn.prompt:
            if block not in seen:
                break
            possible += 1
        seen.update(turn.prompt)
    assert replay.replay(trace, working_set, "lru") == replay.belady(named, working_set, 1) == possible


def test_tail_takes_the_ends_of_long_conversations_first() -> None:
    cache = _cache(1000, policy="tail")
    _compute(cache, list(range(2000)))
    _compute(cache, list(range(5000, 5400)))
    # 1,024 tokens may be computed, 256 of them the question: the last 768 may go, of the long one and of the short one.
    assert cache.evictor.evict(lambda: cache.pools.slabs_used <= (2000 + 400 - 768 - 400) // 4)
    assert _find(cache, [*range(2000), 1]) == 2000 - 768 and _find(cache, [*range(5000, 5400), 1]) == 0
    assert cache.evictor.evict(lambda: cache.pools.slabs_used <= 10) and _find(cache, [*range(2000), 1]) == 40


def test_cost_keeps_what_is_asked_for_often_and_takes_long_to_compute() -> None:
    cache = _cache(1000, policy="cost")
    for _ in range(3):
        _compute(cache, list(range(40)))
    for start in (1000, 2000, 3000):
        _compute(cache, list(range(start, start + 40)))
    assert cache.evictor.evict(lambda: cache.pools.slabs_used <= 21)
    assert _find(cache, [*range(40), 1]) >= 36, "older than the others, but used three times"
    policy = cache.evictor.policy
    _compute(cache, list(range(50_000, 51_000)))
    _compute(cache, list(range(60_000, 60_040)))
    long, short = (next(node for node in cache.index.nodes() if node.end == end and not node.uses) for end in (1000, 40))
    assert policy.worth(policy.kind(long), 5) > policy.worth(policy.kind(short), 5), "attention to more before it"


def test_adaptive_learns_from_what_comes_back() -> None:
    cache = _cache(40)
    policy = cache.evictor.policy
    assert isinstance(policy, Adaptive)
    contexts = [[1000 * n + i for i in range(64)] for n in range(400)]
    for number in range(1, 400):
        # Each context comes back once, soon after it has been pushed out.
        _compute(cache, contexts[number])
        _compute(cache, contexts[number - 1])
    learned = policy.target
    assert learned > 8, "blocks came back that had been used once"
    for number in range(200):
        # One context returns again and again, but never before others, which do not, have pushed some of it out.
        _compute(cache, list(range(64)))
        for start in (1, 2):
            _compute(cache, [1000 * (2 * number + start) + i for i in range(500_000, 500_060)])
    assert policy.target < learned / 2, "blocks came back that had been used again"


def test_adaptive_evicts_from_the_kind_that_exceeds_its_share() -> None:
    policy = Adaptive(4, 100)
    policy.blocks = [60, 40]
    assert policy.worth(0, 200) < policy.worth(1, 900), "the target is 0: blocks used once go first"
    policy.target = 80.0
    assert policy.worth(1, 200) < policy.worth(0, 900)
    assert policy.worth(1, 20) > policy.worth(0, 30), "among young blocks only recency counts"
