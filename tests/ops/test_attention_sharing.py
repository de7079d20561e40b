"""Segments that begin with the same pages: which attend together, what items come of it, and results beside the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from tests.ops.interpreter import DEVICE, DTYPES  # isort: skip  (before Triton's kernels are imported)

from penstock.config.schema import EngineOptions
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.engine.engine import Engine
from penstock.ops import attention_work, registry
from penstock.ops.attention import AttentionOps, Geometry, Ints, SharedPrefixes
from penstock.ops.attention_sharing import PART, SharedTiles, shared_tiles
from penstock.ops.attention_triton import INVARIANT, TRITON, TritonAttention
from penstock.ops.attention_work import FIELDS, WorkItem
from tests.data import MODELS, need
from tests.ops.kernels import random
from tests.ops.test_attention import Case
from tests.ops.test_attention_triton import built, check, covered, wanted


def saved(rows: int, keys: int, queries: int) -> int:
    """A group's gain by the rule, tile by tile."""
    tiles = [queries] * (rows // queries) + [rows % queries]
    return sum(max(0, (size - 1) * keys - PART * (size + 1)) for size in tiles)


def best(common: tuple[int, ...], queries: int) -> int:
    """The most that any grouping by the tree of stretches saves, by trying all of them."""

    @cache
    def of(first: int, last: int) -> dict[int, int]:
        """Rows first to last -> for each number of rows left without a group, the most that the others save."""
        if first == last:
            return {1: 0}
        keys = min(common[first:last])
        edges = [first - 1, *(i for i in range(first, last) if common[i] == keys), last]
        found = {0: 0}
        for before, edge in pairwise(edges):
            found = merged(found, of(before + 1, edge))
        rows = last - first + 1
        for free, gain in list(found.items()):
            found[0] = max(found.get(0, 0), gain + saved(free, keys, queries))
        found[0] = max(found[0], saved(rows, keys, queries))
        return found

    return max(of(0, len(common)).values())


def merged(one: dict[int, int], other: dict[int, int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for a, x in one.items():
        for b, y in other.items():
            found[a + b] = max(found.get(a + b, 0), x + y)
    return found


def total(found: SharedTiles | None) -> int:
    pairs = zip(found.sizes.tolist(), found.keys.tolist(), strict=True) if found is not None else ()
    return sum((size - 1) * keys - PART * (size + 1) for size, keys in pairs)


def test_groups_save_most() -> None:
    """Beside every way to group the rows of small trees: never more than is possible, and close to it."""
    rng, reached, possible = np.random.default_rng(0), 0, 0
    for _ in range(300):
        count, queries, block = int(rng.integers(2, 14)), int(rng.choice([2, 4, 8, 16])), int(rng.choice([32, 64, 128]))
        common = rng.choice([0, 16, 128, 300, 1000, 4096][:rng.integers(1, 7)], count - 1).astype(np.int32)
        order = rng.permutation(count).astype(np.int32)
        found = shared_tiles(SharedPrefixes(order, common), queries, block, 99)
        whole = tuple(int(keys) for keys in common // block * block)
        if found is not None:
            place = np.argsort(order)
            assert len(set(found.mates.tolist())) == len(found.mates), "a segment is in one tile"
            for first, size, keys in zip(found.first, found.sizes, found.keys, strict=True):
                rows = np.sort(place[found.mates[first:first + size]])
                assert 2 <= len(rows) <= queries and keys % block == 0 and keys
                assert common[rows[0]:rows[-1]].min() >= keys, "what all of a tile share"
        assert total(found) <= best(whole, queries)
        reached, possible = reached + total(found), possible + best(whole, queries)
    assert reached > 0.98 * possible


def test_what_is_the_same_is_chosen_once() -> None:
    prefixes = SharedPrefixes(np.arange(64, dtype=np.int32), np.full(63, 4096, np.int32))
    found = shared_tiles(prefixes, 8, 64, 99)
    assert found is shared_tiles(prefixes, 8, 64, 99)
    assert (found.sizes == 8).all() and (found.keys == 4096).all() and len(found.keys) == 8


def test_of_too_many_those_that_save_most() -> None:
    common = np.array([512, 0, 4096, 4096, 0, 1024, 0, 4096], np.int32)
    found = shared_tiles(SharedPrefixes(np.arange(9, dtype=np.int32)[::-1], common), 8, 64, 2)
    assert list(zip(found.sizes.tolist(), found.keys.tolist(), strict=True)) == [(3, 4096), (2, 4096)]
    assert found.mates.tolist() == [6, 5, 4, 1, 0] and found.tile.tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(("common", "groups"), [
    ([16] * 7, []),                                           # a beginning of chats that all have
    ([4096, 4096, 16, 4096, 4096, 4096], [(3, 4096), (4, 4096)]),
    ([1024, 1024, 3072, 3072, 3072, 1024, 1024], [(4, 3072), (4, 1024)]),
    ([1024] * 3 + [1100] + [1024] * 3, [(8, 1024)]),          # two that share a little more than all do
    ([4096] + [100] * 6, [(2, 4096)]),
])
def test_nested_beginnings(common: list[int], groups: list[tuple[int, int]]) -> None:
    found = shared_tiles(SharedPrefixes(np.arange(len(common) + 1, dtype=np.int32), np.array(common, np.int32)), 8, 64, 99)
    tiles = zip(found.sizes.tolist(), found.keys.tolist(), strict=True) if found is not None else ()
    assert sorted(tiles) == sorted(groups)


def prefixes_of(shared: list[tuple[int, int]], start: int = 0) -> SharedPrefixes:
    """Groups of (segments, positions in common), one after another from segment `start` on."""
    common: list[int] = []
    for size, keys in shared:
        common += [keys] * (size - 1) + [0]
    return SharedPrefixes(np.arange(start, start + len(common), dtype=np.int32), np.array(common[:-1], np.int32))


def share(case: Case, shared: list[tuple[int, int]], start: int = 0) -> None:
    """Makes tables of a case that has been built what `prefixes_of` says."""
    for size, keys in shared:
        case.table[start:start + size, :keys // case.page] = case.table[start, :keys // case.page].clone()
        start += size


def run(case: Case, prefixes: SharedPrefixes | None, sinks: torch.Tensor | None = None, capacity: tuple[int, int] | None = None,
        ) -> tuple[torch.Tensor, int]:
    """The step's result, and how many items had several segments."""
    counts = np.array([count for _, count in case.segments], np.int32)
    context = np.array([context for context, _ in case.segments], np.int32)
    geometry = Geometry(case.heads, case.kv, case.size, case.page, case.window, case.k.element_size())
    segments, tokens = capacity or (len(counts), int(counts.sum()))
    array = TRITON.prepare(geometry, counts, context, segments, tokens, shared=prefixes)
    launch = attention_work.layout(geometry, segments, tokens, False).narrow
    items = array[launch.offset:launch.offset + launch.items * FIELDS].reshape(-1, FIELDS)
    work = torch.from_numpy(array).to(DEVICE)
    before = work.clone()
    q = torch.full((tokens, case.heads, case.size), float("nan"), dtype=case.q.dtype, device=DEVICE)
    q[:len(case.q)] = case.q
    there = torch.zeros(segments, dtype=torch.int32, device=DEVICE)
    there[:len(counts)] = case.context
    starts = torch.full((segments + 1,), len(case.q), dtype=torch.int32, device=DEVICE)
    starts[:len(counts) + 1] = case.query_start
    found = TRITON.apply(q, case.k, case.v, case.table, starts, there, case.size ** -0.5, case.window, case.softcap, sinks,
                         work)
    assert torch.equal(work, before), "counters end at zero, for the next layer"
    return found[:len(case.q)], int(((items[:, WorkItem.LISTED] > 0) & (items[:, WorkItem.QUERIES] > 1)).sum())


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short beginnings pay too, so that the interpreter has less to do."""
    monkeypatch.setattr("penstock.ops.attention_sharing.PART", 4)
    monkeypatch.setattr(attention_work, "JOINING", 0)
    monkeypatch.setattr(attention_work, "MULTIPROCESSORS", 12)
    attention_work.layout.cache_clear()
    shared_tiles.cache_clear()
    yield
    attention_work.layout.cache_clear()
    shared_tiles.cache_clear()


RAGGED = [(150, 1), (129, 1), (400, 1), (130, 1), (200, 1), (140, 1), (135, 1)]
STEPS = [
    # (case, shared beginnings, from which segment on)
    (Case(RAGGED, heads=4, kv=2), [(7, 128)], 0),
    (Case(RAGGED, heads=4, kv=2, size=128), [(3, 96), (4, 128)], 0),
    (Case(RAGGED, heads=2, kv=2, size=40), [(7, 112)], 0),
    (Case(RAGGED, heads=3, kv=1, size=96, page=32), [(7, 128)], 0),
    (Case(RAGGED, heads=8, kv=1, size=256), [(7, 112)], 0),
    (Case(RAGGED, heads=16, kv=1), [(7, 128)], 0),
    (Case([(140, 1)] * 5, heads=16, kv=2, softcap=5.0), [(5, 128)], 0),
    (Case([(140, 1)] * 5, heads=4, kv=2, page=64), [(5, 128)], 0),
    (Case([(90, 3), (120, 20), (150, 1), (160, 1), (1, 1), (170, 1)], heads=4, kv=1), [(2, 144)], 2),
    (Case(RAGGED, heads=4, kv=2, window=60), [(7, 128)], 0),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("case", "shared", "start"), STEPS, ids=repr)
@pytest.mark.usefixtures("eager")
def test_attention(case: Case, shared: list[tuple[int, int]], start: int, dtype: torch.dtype) -> None:
    case = built(case, dtype)
    share(case, shared, start)
    found, several = run(case, prefixes_of(shared, start))
    # A tile of 16 rows has no room for two queries of 16 heads, and windows leave nothing to share.
    assert several > 0 or case.heads // case.kv == 16 or case.window
    check(found, wanted(case))


@pytest.mark.usefixtures("eager")
def test_sinks_and_padding() -> None:
    case = built(Case(RAGGED, heads=8, kv=2, softcap=5.0), torch.float32)
    share(case, [(7, 128)])
    sinks = random(case.heads, seed=9).to(DEVICE) * 3
    found, several = run(case, prefixes_of([(7, 128)]), sinks, (9, 9))
    assert several
    check(found, wanted(case, sinks))


@pytest.mark.usefixtures("eager")
def test_random_groups() -> None:
    """Beginnings of any length within others, in any order of segments, of any lengths behind them."""
    rng, several = np.random.default_rng(1), 0
    for seed in range(8):
        count = int(rng.integers(3, 12))
        heads = int(rng.choice([1, 2, 4, 8]))
        page = int(rng.choice([8, 16, 64]))
        context = rng.integers(1, 300, count)
        case = built(Case([(int(length), 1) for length in context], heads=heads, kv=1, size=32, page=page), torch.float32, seed)
        order = rng.permutation(count)
        common = np.minimum(rng.choice([0, 64, 150, 280], count - 1),
                            np.minimum(context[order[1:]], context[order[:-1]]) - 1) // page * page
        for one, other, keys in zip(order, order[1:], common, strict=False):
            case.table[other, :keys // page] = case.table[one, :keys // page].clone()
        found, items = run(case, SharedPrefixes(order.astype(np.int32), common.astype(np.int32)), None, (count + 2, count + 2))
        several += items
        check(found, wanted(case))
    assert several > 8


def test_items_cover_every_key_once() -> None:
    rng, several = np.random.default_rng(2), 0
    for _ in range(150):
        kv_heads = int(rng.choice([1, 2, 8]))
        geometry = Geometry(kv_heads * int(rng.choice([1, 2, 3, 4, 8, 16])), kv_heads, int(rng.choice([64, 128, 256])), 16)
        shared = [(int(rng.integers(1, 90)), int(rng.choice([0, 160, 1000, 4096, 30000]))) for _ in range(rng.integers(1, 4))]
        prefixes = prefixes_of(shared)
        before = np.repeat([keys for _, keys in shared], [size for size, _ in shared])
        context = (before + rng.choice([1, 17, 300, 5000], len(before))).astype(np.int32)
        counts = np.ones(len(context), np.int32)
        if rng.random() < 0.3:
            counts, context = np.append(counts, 200).astype(np.int32), np.append(context, 333).astype(np.int32)
        capacity = len(counts) + int(rng.integers(0, 3)), int(counts.sum()) + int(rng.integers(0, 3))
        work = TRITON.prepare(geometry, counts, context, *capacity, shared=prefixes)
        layout = attention_work.layout(geometry, *capacity, False)
        assert len(work) == layout.size == len(TRITON.prepare(geometry, counts[:0], context[:0], *capacity))
        seen = np.zeros((int(counts.sum()), int(context.max()) + 1), np.int8)
        for launch in (layout.narrow, layout.broad):
            if launch is not None:
                covered(work, launch, seen, kv_heads)
        for token, end in enumerate(context[counts == 1]):
            assert (seen[token, :end] == 1).all() and (seen[token] <= 1).all()
        items = work[:layout.narrow.items * FIELDS].reshape(-1, FIELDS)
        several += int(((items[:, WorkItem.LISTED] > 0) & (items[:, WorkItem.QUERIES] > 1)).sum())
    assert several > 100


def test_where_nothing_is_gained_nothing_changes() -> None:
    """Windows, fixed divisions, groups as wide as a tile, few keys, and those who share too little."""
    geometry = Geometry(16, 8, 128, 16)
    counts, prefixes = np.ones(64, np.int32), prefixes_of([(64, 4096)])
    assert TRITON.shares(geometry) and not INVARIANT.shares(geometry)
    assert not TRITON.shares(dataclasses.replace(geometry, window=1024))
    assert not TRITON.shares(dataclasses.replace(geometry, heads=128))

    def same(attention: TritonAttention, geometry: Geometry, count: int, length: int, prefixes: SharedPrefixes) -> bool:
        sizes = counts[:count], np.full(count, length, np.int32), count, count
        return np.array_equal(attention.prepare(geometry, *sizes, shared=prefixes), attention.prepare(geometry, *sizes))

    assert not same(TRITON, geometry, 64, 4300, prefixes)
    assert same(INVARIANT, geometry, 64, 4300, prefixes)
    assert same(TRITON, dataclasses.replace(geometry, window=1024), 64, 4300, prefixes)
    assert same(TRITON, dataclasses.replace(geometry, heads=128), 64, 4300, prefixes)
    assert same(TRITON, geometry, 64, 4300, prefixes_of([(64, 64)]))
    assert same(TRITON, geometry, 2, 500, prefixes_of([(2, 480)]))


def test_bytes_read_for_a_prefix_of_all() -> None:
    """64 rows behind 4,096 positions: a tile of 16 has 8 rows of 2 heads or 4 rows of 4."""
    counts, context = np.ones(64, np.int32), np.full(64, 4256, np.int32)
    for heads, times in ((16, 8), (32, 16)):
        geometry = Geometry(heads, 8, 128, 16)
        work = TRITON.prepare(geometry, counts, context, 64, 64, shared=prefixes_of([(64, 4096)]))
        items = work[:attention_work.layout(geometry, 64, 64, False).narrow.items * FIELDS].reshape(-1, FIELDS)
        keys = int((items[:, WorkItem.END] - items[:, WorkItem.BEGIN])[items[:, WorkItem.QUERIES] > 0].sum())
        assert keys == times * 4096 + 64 * 160


@pytest.mark.skipif(DEVICE.type == "cuda", reason="kernels do not run on a CPU where there is a GPU; tests/gpu does this there")
@pytest.mark.usefixtures("eager")
def test_an_engine_in_which_requests_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that find a prompt's beginning in the cache, one that has another, and forks: the tokens of the reference, at
    steps in which several rows went together, some left and others came."""
    folder, several = need(MODELS / "stories260k"), list[int]()

    class Watched(TritonAttention):
        def prepare(self, geometry: Geometry, counts: Ints, *rest: Any, **named: Any) -> Ints:
            work = super().prepare(geometry, counts, *rest, **named)
            launch = attention_work.layout(geometry, *rest[1:3], False).narrow
            items = work[:launch.items * FIELDS].reshape(-1, FIELDS)
            several.append(int(items[items[:, WorkItem.LISTED] > 0, WorkItem.QUERIES].max(initial=0)))
            return work

        def apply(self, q: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
            # Prompts would take the interpreter minutes.
            decode = len(q) == len(rest[4])
            return (super().apply if decode else AttentionOps().apply)(q, *rest, **named)

    watched = registry.Implementation("watched", Watched(False), lambda facts, dtype: None, -9)
    monkeypatch.setitem(registry.TABLE["attention"], "watched", watched)
    rng = np.random.default_rng(3)
    beginning = rng.integers(3, 500, 150).tolist()

    def answers(kernel: str) -> dict[tuple[str, int], list[int]]:
        engine = Engine(EngineOptions(model=str(folder), device="cpu", max_model_len=256, max_num_seqs=8,
                                      max_num_batched_tokens=256, kernels={"attention": kernel}))
        draw = np.random.default_rng(4)
        found: dict[tuple[str, int], list[int]] = {}
        for name, prompt, forks in [("first", beginning, 1), *((f"one {i}", beginning + draw.integers(3, 500, i).tolist(), 1)
                                                              for i in (3, 20)),
                                    ("other", draw.integers(3, 500, 60).tolist(), 1), ("forked", beginning[:100], 2)]:
            params = SamplingParams(temperature=0, max_tokens=2 + len(prompt) % 2, ignore_eos=True, n=forks, seed=0)
            engine.submit(Request(name, prompt, params))
        while engine.busy:
            for update in engine.turn():
                found.setdefault((update.request_id, update.index), []).extend(update.token_ids)
        return found

    assert answers("watched") == answers("reference")
    assert max(several) >= 3 and 0 in several, several
