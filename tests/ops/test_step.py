"""From segments to flat arrays: against the definition, with padding."""

from __future__ import annotations

import pytest
import torch

from penstock.ops.registry import implementations
from tests.ops.kernels import reference


@pytest.mark.parametrize("padding", [(0, 0), (3, 5)])
@pytest.mark.parametrize("name", ["reference", "numpy"])
def test_build_step(name: str, padding: tuple[int, int]) -> None:
    build_step = next(one.call for one in implementations("build_step") if one.name == name)
    generator = torch.Generator().manual_seed(0)
    page, length = 4, 40
    known = torch.randint(0, 1000, (6, length), generator=generator).int()
    tables = [torch.randperm(60, generator=generator).view(6, 10).int() for _ in range(2)]
    segments = [(5, 7, 1), (0, 0, 9), (3, 30, 5)]
    row, start, counts = (torch.tensor(column).int() for column in zip(*segments, strict=True))
    empty = torch.zeros(padding[0], dtype=torch.int32)
    row, start, counts = torch.cat((row, empty)), torch.cat((start, empty)), torch.cat((counts, empty))
    query_start = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
    total = int(counts.sum())
    built = build_step(known, tables, row, start, query_start, page, total + padding[1], 9)
    want = [(r, s + i) for r, s, n in segments for i in range(n)]
    assert built.tokens.tolist() == [int(known[r, p]) for r, p in want] + [0] * padding[1]
    assert built.positions.tolist() == [p for _, p in want] + [0] * padding[1]
    for table, slots, seen in zip(tables, built.slots, built.tables, strict=True):
        assert slots.tolist() == [int(table[r, p // page]) * page + p % page for r, p in want] + [-1] * padding[1]
        assert torch.equal(seen[:3], table[[5, 0, 3], :9])
    plain = reference("build_step")(known, tables, row, start, query_start, page, total + padding[1], 9)
    for found, wanted in zip((built.tokens, built.positions, *built.tables, *built.slots),
                             (plain.tokens, plain.positions, *plain.tables, *plain.slots), strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)
