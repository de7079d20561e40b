"""Triton's step builder against the reference: random ragged steps with padding, several cache groups, long tables."""

from __future__ import annotations

import pytest
import torch

from penstock.ops.rows_triton import bring, build_step
from tests.ops.interpreter import DEVICE
from tests.ops.kernels import reference

CASES = [
    # rows, longest, page, groups, counts, padding segments, padding tokens
    (6, 40, 4, 2, [1, 9, 5], 3, 5),
    (1, 17, 16, 1, [1], 0, 0),
    (40, 300, 16, 1, [1] * 33, 7, 7),
    (3, 1000, 1, 3, [700, 1, 0, 299], 0, 24),
    (600, 5, 2, 1, [1, 2, 3] * 190, 0, 0),
    (2, 9000, 8, 1, [1, 1], 0, 0),
]


@pytest.mark.parametrize("size", [1, 512, 1700])
def test_bring(size: int) -> None:
    """The first words alone arrive, and those that the host has now."""
    host = torch.zeros(2048, dtype=torch.int32, pin_memory=DEVICE.type == "cuda")
    there = torch.full((2048,), -1, dtype=torch.int32, device=DEVICE)
    for turn in (1, 2):
        host += torch.arange(2048, dtype=torch.int32)
        bring(host[:size], there[:size])
        assert torch.equal(there[:size].cpu(), turn * torch.arange(size, dtype=torch.int32)) and (there[size:] == -1).all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}x{case[1]}")
def test_build_step(case: tuple[int, int, int, int, list[int], int, int]) -> None:
    rows, longest, page, groups, counts, empty, padding = case
    generator = torch.Generator().manual_seed(rows)
    known = torch.randint(0, 100_000, (rows, longest), generator=generator).int().to(DEVICE)
    columns = -(-longest // page)
    tables = [torch.randint(0, 10_000, (rows, columns), generator=generator).int().to(DEVICE) for _ in range(groups)]
    count = torch.tensor(counts + [0] * empty)
    row = torch.randint(0, rows, (len(count),), generator=generator).int().to(DEVICE)
    start = ((longest - count + 1) * torch.rand(len(count), generator=generator)).int()
    start[len(counts):] = 0
    query_start = torch.cat((torch.zeros(1), count.cumsum(0))).int().to(DEVICE)
    tokens = sum(counts) + padding
    used = -(-(start + count) // page)
    for asked in {columns, int(used.max())}:
        wanted = reference("build_step")(known, tables, row, start.to(DEVICE), query_start, page, tokens, asked)
        found = build_step(known, tables, row, start.to(DEVICE), query_start, page, tokens, asked)
        assert torch.equal(found.tokens, wanted.tokens) and found.tokens.dtype == torch.int32
        assert torch.equal(found.positions, wanted.positions) and found.positions.dtype == torch.int32
        kept = torch.arange(asked)[None, :] < used[:, None]
        for g in range(groups):
            assert torch.equal(found.slots[g], wanted.slots[g]) and found.slots[g].dtype == torch.int64
            assert found.tables[g].shape == wanted.tables[g].shape
            assert torch.equal(found.tables[g].cpu()[kept], wanted.tables[g].cpu()[kept])
