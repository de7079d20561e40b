"""Paged attention: ragged steps against the reference, stale pages, and the bits of a query in any company."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from penstock.ops.table import Implementation
from tests.ops.kernels import DTYPES, close, every, random, reference, usable


@dataclass
class Case:
    """A step of segments (context, queries) over a cache whose pages lie in random order in one arena."""

    segments: list[tuple[int, int]]
    heads: int = 4
    kv: int = 2
    size: int = 64
    page: int = 16
    window: int = 0
    softcap: float = 0.0
    dtype: torch.dtype = torch.float32
    sunk: bool = False
    sloped: bool = False
    tail: int = 0
    """Elements of a key behind its value, which is its beginning: latents."""
    sinks: torch.Tensor | None = None
    slopes: torch.Tensor | None = None

    def build(self, seed: int = 0) -> None:
        longest = max(context for context, _ in self.segments)
        columns = -(-longest // self.page) + 1
        pages = len(self.segments) * columns + 2
        arena = random(pages, 2, 2, self.kv, self.page, self.size, dtype=self.dtype, seed=seed + 1)
        self.k, self.v = arena[:, 1, 0], arena[:, 1, 1]
        if self.tail:
            self.k = random(pages, self.kv, self.page, self.size + self.tail, dtype=self.dtype, seed=seed + 1)
            self.v = self.k[..., :self.size]
        self.sinks = random(self.heads, seed=seed + 3) * 3 if self.sunk else None
        self.slopes = 2.0 ** -torch.arange(1.0, self.heads + 1) if self.sloped else None
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))[:len(self.segments) * columns]
        self.table = torch.full((len(self.segments), columns + 3), -1, dtype=torch.int32)
        self.table[:, :columns] = order.view(len(self.segments), columns)
        self.context = torch.tensor([context for context, _ in self.segments], dtype=torch.int32)
        counts = torch.tensor([0] + [count for _, count in self.segments])
        self.query_start = counts.cumsum(0).int()
        size = self.size + self.tail
        wide = random(int(counts.sum()), self.heads * size * 2, dtype=self.dtype, seed=seed + 2)
        self.q = wide[:, :self.heads * size].view(-1, self.heads, size)

    def run(self, call) -> torch.Tensor:
        return call.apply(self.q, self.k, self.v, self.table, self.query_start, self.context, self.size ** -0.5,
                    self.window, self.softcap, self.sinks, slopes=self.slopes)


CASES = [
    Case([(1, 1)], heads=1, kv=1, size=8, page=1),
    Case([(5, 5), (70, 1), (33, 20), (64, 64), (65, 1)], heads=3, kv=3, size=20, page=8),
    Case([(200, 70), (130, 1), (1, 1)], heads=6, kv=2, size=80, page=16),
    Case([(600, 9), (1300, 1), (20, 20)], heads=8, kv=1, size=96, page=32),
    Case([(100, 100), (300, 1), (90, 33)], heads=4, kv=2, size=64, page=16, window=48),
    Case([(1200, 3), (700, 700)], heads=2, kv=1, size=32, page=8, window=100),
    Case([(150, 70), (40, 1)], heads=4, kv=4, size=16, page=16, softcap=5.0),
    Case([(77, 30), (1100, 2)], heads=16, kv=2, size=256, page=16, softcap=50.0, window=640),
    Case([(130, 3)], heads=71, kv=1, size=64, page=1),
    Case([(30, 7), (9, 9)], heads=2, kv=2, size=7, page=3),
    Case([(2100, 1)], heads=8, kv=2, size=128, page=16),
    Case([(150, 70), (1040, 1), (3, 3)], heads=6, kv=2, size=40, sunk=True),
    Case([(300, 5), (64, 64)], heads=5, kv=5, size=32, sunk=True, window=37),
    Case([(150, 70), (1040, 1), (3, 3)], heads=6, kv=2, size=40, sloped=True),
    Case([(700, 130), (90, 1)], heads=3, kv=3, size=16, sloped=True, sunk=True, window=100),
    Case([(150, 70), (1040, 1), (3, 3)], heads=6, kv=1, size=40, tail=12),
    Case([(530, 3), (20, 20)], heads=71, kv=1, size=64, tail=16, page=8, sunk=True),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", every("attention"))
def test_attention(implementation: Implementation, dtype: torch.dtype) -> None:
    attention = usable(implementation, dtype)
    for case in CASES:
        case.dtype = dtype
        case.build()
        found = case.run(attention)
        case.q, case.k, case.v = case.q.float(), case.k.float(), case.v.float()
        close(found, case.run(reference("attention")), 0.1)


@pytest.mark.parametrize("implementation", every("attention"))
def test_cache_of_another_type(implementation: Implementation) -> None:
    attention = usable(implementation, torch.float32)
    case = Case([(90, 4), (17, 17)])
    case.build()
    case.k, case.v = case.k.to(torch.bfloat16), case.v.to(torch.bfloat16)
    found = case.run(attention)
    case.k, case.v = case.k.float(), case.v.float()
    close(found, case.run(reference("attention")), 0.1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", every("attention"))
@pytest.mark.parametrize(("window", "sloped"), [(0, False), (5, False), (70, True), (600, False), (0, True)])
def test_a_query_sees_all_of_its_segment(implementation: Implementation, dtype: torch.dtype, window: int, sloped: bool) -> None:
    """Of heads that lie between others', in segments shorter and longer than a block and a part, some empty. Alone, a
    segment's bits are the same."""
    attention, lengths, scale = usable(implementation, dtype), (16, 1, 0, 65, 130, 0, 1100, 22), 0.2
    start = torch.tensor([0, *lengths]).cumsum(0).int()
    qkv = random(int(start[-1]), 10, 20, dtype=dtype, seed=4)
    slopes = 2.0 ** -torch.arange(1.0, 7) if sloped else None
    found = attention.whole(*qkv.split((6, 2, 2), 1), start, scale, window, slopes)
    close(found, reference("attention").whole(*qkv.float().split((6, 2, 2), 1), start, scale, window, slopes), 0.1)
    for begin, end in pairwise(start.tolist()):
        numbers = torch.tensor([0, end - begin], dtype=torch.int32)
        alone = attention.whole(*qkv[begin:end].split((6, 2, 2), 1), numbers, scale, window, slopes)
        assert torch.equal(alone, found[begin:end])


@pytest.mark.parametrize("implementation", every("attention"))
@pytest.mark.parametrize("window", [0, 70])
def test_a_query_in_any_company(implementation: Implementation, window: int) -> None:
    """The bits are the same alone, in chunks of any size, beside other segments, and when threads share its parts."""
    attention = usable(implementation, torch.bfloat16)
    case = Case([(1500, 1500)], heads=6, kv=2, size=40, window=window, dtype=torch.bfloat16)
    case.build()
    whole = case.run(attention)
    for chunk in (1, 7, 64, 500):
        for start in (0, 3, 60, 500, 1010, 1490):
            count = min(chunk, 1500 - start)
            part = Case([(start + count, count)], heads=6, kv=2, size=40, window=window, dtype=torch.bfloat16)
            part.k, part.v, part.table, part.q = case.k, case.v, case.table, case.q[start:start + count]
            part.context, part.query_start = torch.tensor([start + count]).int(), torch.tensor([0, count]).int()
            assert torch.equal(part.run(attention), whole[start:start + count]), (chunk, start)
    crowd = Case([(1500 - i, 1) for i in range(40)], heads=6, kv=2, size=40, window=window, dtype=torch.bfloat16)
    crowd.k, crowd.v, crowd.table = case.k, case.v, case.table.expand(40, -1)
    crowd.context, crowd.query_start = torch.arange(1500, 1460, -1).int(), torch.arange(41).int()
    crowd.q = case.q.flip(0)[:40]
    assert torch.equal(crowd.run(attention), whole.flip(0)[:40])


@pytest.mark.parametrize("implementation", every("attention"))
def test_stale_and_unwritten_entries_are_not_read(implementation: Implementation) -> None:
    attention = usable(implementation, torch.float32)
    case = Case([(130, 3), (40, 1)], window=50)
    case.build()
    wanted = case.run(reference("attention"))
    table = case.table.long()
    for s, (context, count) in enumerate(case.segments):
        first = max(0, context - count - 50 + 1)
        for position in [*range(context, (context // 16 + 1) * 16), *range(first // 16 * 16, first)]:
            for cache in (case.k, case.v):
                cache[table[s, position // 16], :, position % 16] = float("nan")
        case.table[s, :first // 16] = -1
    close(case.run(attention), wanted, 0.1)


@pytest.mark.parametrize("implementation", every("attention"))
def test_segments_without_queries(implementation: Implementation) -> None:
    attention = usable(implementation, torch.float32)
    case = Case([(20, 2), (30, 0), (10, 10)])
    case.build()
    close(case.run(attention), case.run(reference("attention")), 0.1)
