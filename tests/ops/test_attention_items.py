"""The items of random steps, carried out in numpy: what each query attends to, in which slots parts are, and who joins them."""

from __future__ import annotations

from collections import Counter

import numpy as np

from penstock.ops import attention_work
from penstock.ops.attention import Geometry, Ints, SharedPrefixes
from penstock.ops.attention_triton import TRITON
from penstock.ops.attention_work import FIELDS, LISTED, Launch, WorkItem

Range = tuple[int, int]


class Programs:
    """A launch's programs for one KV head, in any order."""

    def __init__(self, work: Ints, launch: Launch, kv_heads: int) -> None:
        self.items = work[launch.offset:launch.offset + launch.items * FIELDS].reshape(-1, FIELDS)
        self.list = work[launch.mates:launch.counters]
        self.lines = self.list[:len(self.list) // LISTED * LISTED].reshape(-1, LISTED).tolist()
        self.slots, self.kv_heads = launch.slots, kv_heads
        self.room = (launch.end - launch.counters) // kv_heads
        self.parts: dict[int, tuple[int, Range]] = {}
        self.counters: Counter[int] = Counter()
        self.ends: dict[int, list[Range]] = {}
        """Of each token whose result was written what went into it."""
        self.read: list[tuple[int, int, int]] = []
        """Token, by whose table it read, up to which key."""
        self.several = 0

    def run(self, order: Ints) -> None:
        for item in self.items[order].tolist():
            if item[WorkItem.QUERIES]:
                self.program(item)
        assert not self.parts and not any(self.counters.values()), "parts that nobody joined"

    def program(self, item: list[int]) -> None:
        queries, position = item[WorkItem.QUERIES], item[WorkItem.POSITION]
        begin, end = item[WorkItem.BEGIN], item[WorkItem.END]
        tokens = self.tokens(item, item[WorkItem.FIRST], queries)
        self.several += item[WorkItem.LISTED] > 0 and queries > 1
        seen = [(begin, max(begin, min(end, position + i + 1))) for i in range(queries)]
        self.read += [(token, item[WorkItem.SEGMENT], last) for token, (_, last) in zip(tokens, seen, strict=True)]
        if item[WorkItem.COMPLETE] == 1:
            for token, keys in zip(tokens, seen, strict=True):
                self.finish(token, [keys])
            return
        for i, (token, keys) in enumerate(zip(tokens, seen, strict=True)):
            slot = item[WorkItem.SLOT] + i
            assert slot not in self.parts and 0 <= slot < self.slots
            self.parts[slot] = token, keys
        counter = item[WorkItem.COUNTER]
        assert 0 <= counter < self.room
        self.counters[counter] += 1
        if self.counters[counter] == item[WorkItem.COMPLETE]:
            self.counters[counter] = 0
            self.join(item)

    def join(self, item: list[int]) -> None:
        joined, parts, listed = item[WorkItem.TILE_QUERIES], item[WorkItem.PARTS], item[WorkItem.LISTED]
        for i, token in enumerate(self.tokens(item, 0, joined)):
            _, own, count = self.lines[listed - 1 + i] if listed else (0, 0, 0)
            assert count <= item[WorkItem.MOST]
            slots = [item[WorkItem.TILE_SLOT] + part * joined + i for part in range(parts)] + list(range(own, own + count))
            found = [self.parts.pop(slot) for slot in slots]
            assert all(whose == token for whose, _ in found), "another's part"
            self.finish(token, [keys for _, keys in found])

    def tokens(self, item: list[int], first: int, queries: int) -> list[int]:
        if item[WorkItem.LISTED]:
            return [line[0] for line in self.lines[item[WorkItem.LISTED] - 1 + first:][:queries]]
        return list(range(item[WorkItem.TOKEN] + first, item[WorkItem.TOKEN] + first + queries))

    def finish(self, token: int, keys: list[Range]) -> None:
        assert token not in self.ends, "a result is written twice"
        self.ends[token] = keys


def step(rng: np.random.Generator, segments: int, mixed: bool) -> tuple[Ints, Ints, SharedPrefixes | None]:
    """Counts, contexts, and what those of one query share: all the same beginning, pairs, trees, or nothing."""
    kind = rng.choice(["one", "pairs", "tree", "ragged", "nothing"])
    counts = np.ones(segments, np.int32)
    if mixed:
        long = rng.random(segments) < 0.2
        counts[long] = rng.choice([2, 3, 5, 17, 200, 700], int(long.sum()))
    base = int(rng.choice([40, 600, 4096, 30000]))
    own = rng.choice([1, 2, 17, 160, 1000], segments)
    if rng.random() < 0.2:
        own[rng.integers(segments)] = 100_000
    single = rng.permutation(np.flatnonzero(counts == 1)).astype(np.int32)
    common = np.zeros(max(0, len(single) - 1), np.int64)
    if kind == "one":
        common[:] = base
    elif kind == "pairs":
        common[::2] = base
    elif kind == "tree":
        common[:] = rng.choice([0, base // 4, base // 2, base], len(common))
    elif kind == "ragged":
        common[:] = rng.integers(0, base, len(common))
    common = common // 16 * 16
    least = np.zeros(segments, np.int64)
    for one, other, keys in zip(single, single[1:], common, strict=False):
        least[one], least[other] = max(least[one], keys), max(least[other], keys)
    context = (least + np.maximum(own, counts)).astype(np.int32)
    return counts, context, SharedPrefixes(single, common.astype(np.int32)) if common.any() else None


def test_programs_attend_to_every_key_once_and_stay_in_their_room() -> None:
    rng, seen = np.random.default_rng(5), Counter[str]()
    for number in range(400):
        kv_heads = int(rng.choice([1, 2, 4, 8, 8, 16]))
        group = int(rng.choice([1, 2, 2, 3, 4, 4, 6, 8, 9, 12, 16]))
        geometry = Geometry(kv_heads * group, kv_heads, int(rng.choice([64, 80, 96, 128, 192, 256])), 16,
                            itemsize=int(rng.choice([2, 2, 2, 4])))
        segments = int(rng.choice([1, 2, 3, 7, 20, 33, 64, 128, 200]))
        counts, context, prefixes = step(rng, segments, bool(rng.random() < 0.3))
        tokens = int(counts.sum())
        padded = segments + int(rng.choice([0, 0, 1, 5, 56]))
        capacity = (padded, padded) if tokens == segments else (padded, tokens + int(rng.choice([0, 3, 500])))
        work = TRITON.prepare(geometry, counts, context, *capacity, shared=prefixes)
        layout = attention_work.layout(geometry, *capacity, False)
        assert len(work) == layout.size
        ends: dict[int, list[Range]] = {}
        read = list[tuple[int, int, int]]()
        for launch in (layout.narrow, layout.broad):
            if launch is None:
                continue
            programs = Programs(work, launch, kv_heads)
            programs.run(rng.permutation(len(programs.items)))
            assert not ends.keys() & programs.ends.keys()
            ends |= programs.ends
            read += programs.read
            seen["several"] += programs.several
            used = max((item[WorkItem.LISTED] - 1 + item[WorkItem.TILE_QUERIES] for item in programs.items.tolist()
                        if item[WorkItem.LISTED]), default=0)
            assert not programs.list[used * LISTED:].any() and not work[launch.counters:launch.end].any()
        segment_of = np.repeat(np.arange(segments), counts)
        first = np.cumsum(counts) - counts
        assert len(ends) == tokens, f"step {number}: results of {len(ends)} of {tokens} tokens"
        for token, ranges in ends.items():
            segment, at = segment_of[token], 0
            for begin, end in sorted(keys for keys in ranges if keys[0] < keys[1]):
                assert begin == at, f"step {number}: token {token}: {ranges}"
                at = end
            assert at == context[segment] - counts[segment] + token - first[segment] + 1
        shared = pairs(prefixes, segments)
        for token, segment, last in read:
            assert segment == segment_of[token] or last <= shared[segment, segment_of[token]], "keys of another's own"
    assert seen["several"] > 1000, seen


def pairs(prefixes: SharedPrefixes | None, segments: int) -> Ints:
    """[S, S] positions that any two segments share."""
    found = np.zeros((segments, segments), np.int32)
    if prefixes is not None:
        for i, one in enumerate(prefixes.segments[:-1]):
            least = np.minimum.accumulate(prefixes.common[i:])
            found[one, prefixes.segments[i + 1:]] = found[prefixes.segments[i + 1:], one] = least
    return found


def test_all_take_part_in_the_last_round() -> None:
    """Single tokens of more segments than are run at a time: served in order by as many programs as run at once, longest first,
    none of these works much longer than its share."""
    geometry = Geometry(32, 8, 128, 16)
    for segments, keys in ((50, 2066), (56, 4000), (64, 2066), (72, 8000), (104, 2066), (160, 3000)):
        plan = attention_work.layout(geometry, segments, segments, False).narrow
        counts, context = np.ones(segments, np.int32), np.full(segments, keys, np.int32)
        work = attention_work.prepare(geometry, counts, context, segments, segments, False)
        items = work[plan.offset:plan.offset + plan.items * FIELDS].reshape(-1, FIELDS)
        items = items[items[:, WorkItem.QUERIES] > 0]
        programs = np.zeros(plan.split)
        for length in items[:, WorkItem.END] - items[:, WorkItem.BEGIN]:
            programs[programs.argmin()] += length
        assert programs.sum() == segments * keys
        assert programs.max() < 1.2 * segments * keys / plan.split, segments
