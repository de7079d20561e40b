"""Paged attention in Triton against the reference: in the interpreter without a GPU, in all dtypes with one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.ops.interpreter import DEVICE, DTYPES  # isort: skip  (before Triton's kernels are imported)

from penstock.ops import attention_library, attention_work
from penstock.ops.attention import LEAST, AttentionOps, Geometry, Span, Stripe, Tree
from penstock.ops.attention_triton import INVARIANT, TRITON, TritonAttention
from penstock.ops.attention_work import FIELDS, LISTED, Launch, WorkItem
from penstock.ops.rows_triton import move_step
from penstock.ops.step import Moving
from tests.ops import test_attention_trees as trees
from tests.ops.kernels import close, random, reference
from tests.ops.test_attention import CASES, Case

BOTH = pytest.mark.parametrize("attention", [TRITON, INVARIANT], ids=["triton", "invariant"])
HALF = DTYPES[-1]
"""The GPU's dtype, or the interpreter's nearest."""


def built(case: Case, dtype: torch.dtype, seed: int = 0) -> Case:
    case = dataclasses.replace(case, dtype=dtype)
    case.build(seed)
    for name in ("k", "v", "table", "context", "query_start", "q", "sinks", "slopes"):
        if getattr(case, name) is not None:
            setattr(case, name, getattr(case, name).to(DEVICE))
    if case.tail:  # one memory on the device, too
        case.v = case.k[..., :case.size]
    return case


def wanted(case: Case) -> torch.Tensor:
    return reference("attention").apply(
        case.q.float(), case.k.float(), case.v.float(), case.table, case.query_start, case.context, case.size ** -0.5,
        case.window, case.softcap, case.sinks, slopes=case.slopes)


def check(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Weights are rounded to the cache's type before they multiply values of size 1."""
    close(found, exact, 0.1 if found.dtype is torch.float32 else 1.0, 2.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=repr)
@BOTH
def test_attention(attention: TritonAttention, case: Case, dtype: torch.dtype) -> None:
    if DEVICE.type == "cpu" and dtype is not torch.float32 and CASES.index(case) % 3 and not case.tail:
        pytest.skip("the interpreter takes its time")
    case = built(case, dtype)
    check(case.run(attention), wanted(case))


@pytest.mark.parametrize(("ranks", "how"), [(2, {}), (2, {"sunk": True, "softcap": 30.0}), (4, {}),
                                            (2, {"heads": 6, "kv": 1, "tail": 16}), (4, {"heads": 72, "kv": 1, "tail": 16})])
@BOTH
def test_stripes_of_keys_add_up(attention: TritonAttention, ranks: int, how: dict[str, Any]) -> None:
    """Each rank has a run of every page; some see none of a query's keys. Captured or not, sizes may be padded. Keys and values
    may be latents."""
    case = built(Case([(900, 1), (33, 1), (64, 5), (5, 1), (16, 1), (700, 40)], **how), torch.float32)
    size, long = 16 // ranks, Span(5, 9, 40, 660)
    tokens, results, sums = len(case.q), [], []
    for rank in range(ranks):
        stripe = Stripe(rank, ranks)
        k, v = (x[:, :, rank * size:(rank + 1) * size] for x in (case.k, case.v))
        rest = case.table, case.query_start, case.context, case.size ** -0.5, case.softcap, case.sinks
        geometry = Geometry(case.heads, case.kv, 64, size, 0, 4, tail=case.tail, stripe=stripe)
        counts = np.diff(case.query_start.cpu().numpy())
        array = attention.prepare(geometry, counts, case.context.cpu().numpy(), 6, tokens + 7, [long])
        q = torch.cat((case.q, torch.full((7, *case.q.shape[1:]), float("nan"), device=DEVICE)))
        found = attention.striped(q, k, v, *rest, torch.from_numpy(array).to(DEVICE), [long], None, None, stripe)
        exact = reference("attention").striped(case.q, k, v, *rest, None, [long], None, None, stripe)
        assert (found[1][tokens:] == LEAST).all() and not found[0][tokens:].any()
        torch.testing.assert_close(found[1][:9], exact[1][:9], rtol=1e-4, atol=1e-4)
        results.append(found[0][:9])
        sums.append(found[1][:9])
    weights = torch.stack(sums).softmax(0)
    check((torch.stack(results) * weights[..., None]).sum(0), wanted(case)[:9])


@BOTH
def test_cache_of_another_type(attention: TritonAttention) -> None:
    case = built(Case([(90, 4), (17, 17)]), torch.float32)
    case.k, case.v = case.k.half(), case.v.half()
    check(case.run(attention), wanted(case))


@BOTH
def test_stale_and_unwritten_entries_are_not_read(attention: TritonAttention) -> None:
    case = built(Case([(530, 3), (40, 1), (300, 100)], window=50), torch.float32)
    exact = wanted(case)
    table = case.table.long()
    for s, (context, count) in enumerate(case.segments):
        first = max(0, context - count - 50 + 1)
        for position in [*range(context, (context // 16 + 1) * 16), *range(first // 16 * 16, first)]:
            for cache in (case.k, case.v):
                cache[table[s, position // 16], :, position % 16] = float("nan")
        case.table[s, :first // 16] = 1 << 30
        case.table[s, context // 16 + 1:] = 1 << 30
    check(case.run(attention), exact)


@BOTH
def test_padding_does_nothing_and_counters_end_at_zero(attention: TritonAttention) -> None:
    """A captured graph's view: capacities beyond the step, the same array for every layer, other contents another time."""
    for segments in ([(900, 1), (3, 1)], [(70, 1)], [(500, 20), (64, 2), (31, 0)]):
        case = built(Case(segments), torch.float32)
        geometry = Geometry(4, 2, 64, 16, 0, 4)
        counts = np.array([count for _, count in segments], np.int32)
        array = attention.prepare(geometry, counts, case.context.cpu().numpy(), 6, 40)
        work = torch.from_numpy(array).to(DEVICE)
        before = work.clone()
        tokens = int(counts.sum())
        q = torch.full((40, 4, 64), float("nan"), device=DEVICE)
        q[:tokens] = case.q
        context, starts = torch.zeros(6, dtype=torch.int32, device=DEVICE), torch.full((7,), tokens, device=DEVICE)
        context[:len(segments)], starts[:len(segments) + 1] = case.context, case.query_start
        runs = [attention.apply(q, case.k, case.v, case.table, starts.int(), context, 0.125, work=work) for _ in range(2)]
        check(runs[0][:tokens], wanted(case))
        assert torch.equal(runs[0][:tokens], runs[1][:tokens])
        assert torch.equal(work, before)


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("segments", [[(900, 1), (33, 1), (64, 5)], [(700, 5), (300, 5), (129, 1)], [(500, 90), (40, 3)]],
                         ids=str)
def test_upper_bounds_of_contexts(segments: list[tuple[int, int]], window: int) -> None:
    """The host divides the work of contexts that may be longer than they are; the device moves the queries to their places."""
    for lag in ([0] * len(segments), [5, 0, 3, 11][:len(segments)], [7] * len(segments)):
        case = built(Case(segments, window=window), torch.float32)
        geometry = Geometry(4, 2, 64, 16, window, 4)
        counts, context = (np.array(column, np.int32) for column in (case.query_start.diff().tolist(), case.context.tolist()))
        slack = np.array([min(2 * n, 12) for n in lag], np.int32)
        room, tokens = len(segments) + 2, int(counts.sum()) + 3
        bound = context + np.array(lag, np.int32)
        work = torch.from_numpy(TRITON.prepare(geometry, counts, bound, room, tokens, slack=slack)).to(DEVICE)
        places = torch.zeros(9, room, dtype=torch.int32, device=DEVICE)
        of = Moving(*places)
        of.row[:], of.start[:len(segments)] = torch.arange(room), torch.from_numpy(bound - counts)
        of.slack[:len(segments)] = torch.from_numpy(slack)
        length = torch.from_numpy(np.append(bound - counts - np.array(lag, np.int32), [0, 0])).to(DEVICE) + 1
        move_step(of, TRITON.items(geometry, work, room, tokens), length)
        q = torch.zeros(tokens, 4, 64, device=DEVICE)
        q[:len(case.q)] = case.q
        exact, starts = torch.zeros(room, dtype=torch.int32, device=DEVICE), torch.full((room + 1,), len(case.q), device=DEVICE)
        exact[:len(segments)], starts[:len(segments) + 1] = case.context, case.query_start
        found = TRITON.apply(q, case.k, case.v, case.table, starts.int(), exact, case.size ** -0.5, window, work=work)
        check(found[:len(case.q)], wanted(case))


def by_library(case: Case, monkeypatch: pytest.MonkeyPatch) -> list[Span]:
    """The segments of a case that the library is to serve, after comparing the result with the reference."""
    monkeypatch.setattr(attention_library, "available", lambda: True)
    counts = np.array([count for _, count in case.segments], np.int32)
    context = np.array([context for context, _ in case.segments], np.int32)
    geometry = Geometry(case.heads, case.kv, case.size, 16)
    spans = TRITON.library_spans(geometry, counts, context)
    assert not INVARIANT.library_spans(geometry, counts, context)
    assert not TRITON.library_spans(dataclasses.replace(geometry, window=64), counts, context)
    check(TRITON.apply(case.q, case.k, case.v, case.table, case.query_start, case.context, case.size ** -0.5, library=spans,
                       sinks=case.sinks), wanted(case))
    return spans


def test_long_prompts_by_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the host names, beside others; padded lengths, and no room behind the last token."""
    for segments in ([(1100, 1), (1010, 1010), (1200, 90), (1100, 1100)], [(1024, 1024)], [(1500, 1500), (64, 64)],
                     [(1024, 1024)] * 2, [(1500, 1500)] * 2, [(9, 9), (1500, 1500), (1490, 1490), (1470, 1470)]):
        spans = by_library(built(Case(segments, heads=2, kv=1), HALF), monkeypatch)
        named = [s for s, (end, count) in enumerate(segments) if end == count and (count == 1024 or count > 1400)]
        assert [span.segment for span in spans] == named
        groups = [len(group) for group in attention_library.groups(spans)]
        assert groups == {2: [2], 3: [2, 1]}.get(len(spans), [1] * len(spans))


def test_sinks_take_their_share_of_what_a_library_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_library, "BLOCKS", (256, 64))
    for segments in ([(1024, 1024)], [(40, 3), (1100, 1100), (1500 + 676, 1500)]):
        assert by_library(built(Case(segments, heads=4, kv=2, size=24, sunk=True), HALF), monkeypatch)


@pytest.mark.parametrize("segments, served, joined", [
    ([(1024 + 256, 1024)], [0], [2]),
    ([(40, 3), (1500 + 676, 1500), (9, 9)], [1], [4, 2]),
    ([(1472 + 999, 1472), (1024, 1024)], [0, 1], [4, 4]),
    ([(1024 + 3, 1024)], [], []),
], ids=str)
def test_chunks_behind_a_context_by_a_library(segments: list[tuple[int, int]], served: list[int], joined: list[int],
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """A context in blocks of two sizes and a rest, so many parts that they are joined in between, beside other segments."""
    monkeypatch.setattr(attention_library, "BLOCKS", (256, 64))
    counts: list[int] = []
    real = attention_library._join

    def join(parts: list[attention_library._Part], out: torch.Tensor) -> attention_library._Part:
        counts.append(len(parts))
        return real(parts, out)

    monkeypatch.setattr(attention_library, "_join", join)
    case = built(Case(segments, heads=6, kv=2, size=24), HALF)
    assert [span.segment for span in by_library(case, monkeypatch)] == served
    assert counts == joined


@pytest.mark.parametrize("ops", [TRITON, AttentionOps()], ids=["triton", "reference"])
def test_a_segment_over_two_parts_of_its_keys(ops: AttentionOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks that divide contexts compute it: first keys that all queries see, then the others, and both joined."""
    monkeypatch.setattr(attention_library, "BLOCKS", (256, 64))
    case = built(Case([(700 + 600, 600)], heads=6, kv=2, size=24), HALF)
    row, scale = case.table[0], 24 ** -0.5
    first = ops.segment(case.q, case.k, case.v, row, 512, False, scale)
    found, sums = ops.segment(case.q, case.k, case.v, row[512 // 16:], 700 - 512, True, scale, seen=lambda: [first])
    check(found, wanted(case))
    assert torch.allclose(sums, AttentionOps().segment(case.q, case.k, case.v, row, 700, True, scale)[1], atol=1e-3)


@pytest.mark.parametrize("lengths", [[512, 512, 512], [512, 300, 290], [1024], [40, 1000]])
def test_prompts_by_groups_of_one_length(lengths: list[int]) -> None:
    """Keys and values of several prompts, one behind the other, and values narrower than keys; a decoding token stands before
    the prompts, whose row stays."""
    total = sum(lengths)
    sizes = ((total + 1, 24), (total, 24), (total, 16))
    q, k, v = (random(rows, 2, size, seed=size + rows).to(HALF).to(DEVICE) for rows, size in sizes)
    spans = [Span(1 + place, 1 + sum(lengths[:place]), count, 0) for place, count in enumerate(lengths)]
    found, wanted = (torch.full((total + 1, 2, 16), 7.0, dtype=HALF, device=DEVICE) for _ in range(2))
    TRITON.prompts(q, k, v, 0.2, spans, found)
    AttentionOps().prompts(q, k, v, 0.2, spans, wanted)
    close(found, wanted.float(), 1.0, 4.0)
    assert (found[0] == 7.0).all()


@pytest.mark.skipif(DEVICE.type != "cuda", reason="cuDNN needs a GPU")
@pytest.mark.parametrize("heads, kv, size", [(8, 2, 64), (4, 4, 96), (8, 2, 128), (4, 2, 192), (4, 2, 256), (5, 1, 128)])
def test_long_chunks_by_cudnn(heads: int, kv: int, size: int) -> None:
    """The real library: whole prompts, and chunks behind contexts of several blocks, for every size of heads."""
    if not attention_library.available():
        pytest.skip("no cuDNN, or not Hopper")
    for segments in ([(8192, 8192)], [(16384 + 4096 * 3 + 77, 2000), (500, 500), (4000, 1)], [(2048 + 4096, 2048)]):
        case = built(Case(segments, heads=heads, kv=kv, size=size, sunk=size == 64), torch.bfloat16)
        counts, context = (np.array(values, np.int32) for values in zip(*((n, end) for end, n in segments), strict=True))
        spans = TRITON.library_spans(Geometry(heads, kv, size, 16), counts, context)
        assert spans and spans[0].segment == 0
        found = TRITON.apply(case.q, case.k, case.v, case.table, case.query_start, case.context, size ** -0.5, library=spans,
                             sinks=case.sinks)
        check(found, wanted(case))


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parts that double at position 256, so that short contexts meet what long ones do."""
    monkeypatch.setattr(attention_work, "FIRST_UNIT", 64)
    monkeypatch.setattr(attention_work, "UNITS", 4)
    attention_work.layout.cache_clear()
    yield
    attention_work.layout.cache_clear()


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.usefixtures("small_units")
def test_a_query_in_any_company(dtype: torch.dtype, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits are the same alone, in chunks of any size, beside other segments and in batches, however keys are split."""
    shape = {"heads": 3, "kv": 1, "size": 40, "window": window}
    case = built(Case([(330, 330)], **shape), dtype)
    whole = case.run(INVARIANT)
    check(whole, wanted(case))

    def part(context: list[int], counts: list[int]) -> torch.Tensor:
        one = Case([], **shape, dtype=dtype)
        one.k, one.v, one.table = case.k, case.v, case.table.expand(len(counts), -1)
        one.q = torch.cat([case.q[end - count:end] for end, count in zip(context, counts, strict=True)])
        one.context = torch.tensor(context, dtype=torch.int32, device=DEVICE)
        one.query_start = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device=DEVICE)
        return one.run(INVARIANT)

    for start, count in [(0, 1), (63, 1), (64, 7), (250, 12), (255, 1), (256, 1), (270, 60), (329, 1), (0, 330)]:
        assert torch.equal(part([start + count], [count]), whole[start:start + count]), (start, count)
    for size in (2, 20) if DEVICE.type == "cpu" else (2, 20, 160):
        ends = [330 - 2 * i for i in range(size)]
        assert torch.equal(part(ends, [1] * size), torch.stack([whole[end - 1] for end in ends])), size
    mixed = part([330, 260, 90], [1, 30, 90])
    assert torch.equal(mixed, torch.cat([whole[329:330], whole[230:260], whole[:90]]))
    # With so few programs most have all the keys of their queries.
    monkeypatch.setattr(attention_work, "MULTIPROCESSORS", 2)
    attention_work.layout.cache_clear()
    assert torch.equal(part([330], [330]), whole)


def covered(work: np.ndarray, launch: Launch, seen: np.ndarray, kv_heads: int, fixed: bool = False) -> None:
    """Adds 1 to seen[token, key] for each key that an item gives to a token, and checks what is said of parts.

    fixed: an item has a part for each of its units of keys, else one.
    """
    items = work[launch.offset:launch.offset + launch.items * FIELDS].reshape(launch.items, FIELDS)
    mates = work[launch.mates:launch.counters].reshape(-1)
    assert not work[launch.counters:launch.end].any()
    slots, counted, tiles = list[int](), dict[int, int](), dict[int, tuple[int, ...]]()
    for item in items[items[:, WorkItem.QUERIES] > 0]:
        token, queries, _, _, begin, end, unit, ends, at, slot, listed, counter, first, joined, parts, most = item
        assert queries <= launch.shape.queries and begin % launch.shape.block_n == 0 and begin < end
        lines = mates[(listed - 1) * LISTED:(listed - 1 + joined) * LISTED].reshape(-1, LISTED)
        tokens = lines[at:at + queries, 0] if listed else np.arange(token + at, token + at + queries)
        seen[tokens, begin:end] += 1
        if ends == 1:
            assert not at and not listed
            continue
        assert at + queries <= joined and len(tokens) == queries
        count = -(-int(end - begin) // int(unit)) if fixed else 1
        slots += range(slot, slot + count * queries)
        assert tiles.setdefault(int(counter), (ends, listed, first, joined, parts, most)) == (
            ends, listed, first, joined, parts, most)
        counted[int(counter)] = counted.get(int(counter), 0) + count
    wanted = list[int]()
    for counter, (ends, listed, first, joined, parts, most) in tiles.items():
        assert counted[counter] == ends and (counter + 1) * kv_heads <= launch.end - launch.counters
        wanted += range(first, first + parts * joined)
        lines = mates[(listed - 1) * LISTED:(listed - 1 + joined) * LISTED].reshape(-1, LISTED) if listed else mates[:0]
        assert most == max((int(line[2]) for line in lines), default=0)
        for _, own, count in lines:
            wanted += range(own, own + count)
    assert len(set(slots)) == len(slots) and sorted(slots) == sorted(wanted), "what is joined is what is written"
    assert max(slots, default=0) < launch.slots


@BOTH
def test_items_cover_every_key_once(attention: TritonAttention) -> None:
    rng = np.random.default_rng(0)
    for _ in range(150):
        kv_heads = int(rng.choice([1, 2, 8]))
        geometry = Geometry(kv_heads * int(rng.choice([1, 3, 4, 8])), kv_heads, int(rng.choice([64, 256])), 16,
                            int(rng.choice([0, 0, 100, 1000])))
        segments = int(rng.integers(1, 12))
        counts = rng.choice([0, 1, 1, 1, 5, 200], segments).astype(np.int32)
        context = counts + rng.choice([0, 1, 700, 40000], segments).astype(np.int32)
        tokens = int(counts.sum())
        if not tokens:
            continue
        capacity = segments + int(rng.integers(0, 3)), tokens + int(rng.integers(0, 3))
        work = attention.prepare(geometry, counts, context, *capacity)
        assert len(work) == len(attention.prepare(geometry, counts[:0], context[:0], *capacity))
        layout = attention_work.layout(geometry, *capacity, attention.invariant)
        seen = np.zeros((tokens, int(context.max()) + 1), np.int8)
        for launch in (layout.narrow, layout.broad):
            if launch is not None:
                covered(work, launch, seen, kv_heads, attention.invariant)
        token = 0
        for count, end in zip(counts, context, strict=True):
            for i in range(count):
                position = end - count + i
                first = max(0, position - geometry.window + 1) if geometry.window else 0
                assert (seen[token, first:position + 1] == 1).all(), "every key that a query sees is in one of its items"
                assert (seen[token] <= 1).all()
                token += 1


@BOTH
def test_queries_of_draft_trees_see_their_ancestors_alone(attention: TritonAttention) -> None:
    *given, tree = trees.case()
    found = attention.apply(*(x.to(DEVICE) for x in given), trees.SIZE ** -0.5, tree=Tree(*(x.to(DEVICE) for x in tree)))
    torch.testing.assert_close(found.cpu(), trees.expected(), atol=2e-3, rtol=2e-3)
