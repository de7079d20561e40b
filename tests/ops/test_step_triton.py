"""Triton's step builder against the reference: random ragged steps with padding, several cache groups, long tables."""

from __future__ import annotations

import pytest
import torch

from penstock.ops.attention_work import FIELDS
from penstock.ops.rows_triton import bring, build_step, move_step
from penstock.ops.step import Moving
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
            own, theirs = found.groups[g], wanted.groups[g]
            assert torch.equal(own.slots, theirs.slots) and own.slots.dtype == torch.int64
            assert own.table.shape == theirs.table.shape
            assert torch.equal(own.table.cpu()[kept], theirs.table.cpu()[kept])


@pytest.mark.parametrize("sizes", [(1, 1, [3]), (7, 7, []), (5, 40, [600, 17]), (700, 1200, [1500])], ids=str)
def test_move_step(sizes: tuple[int, int, list[int]]) -> None:
    """The first correction and the passes behind it: segments that the host is sure of and others, with and without passes."""
    segments, lines, lists = sizes
    generator = torch.Generator().manual_seed(segments)

    def random(below: int, *size: int, least: int = 0) -> torch.Tensor:
        return torch.randint(least, below, size, generator=generator, dtype=torch.int32)

    places = {"row": random(9, segments), "start": random(900, segments), "context": random(900, segments),
              "slack": random(3, segments), "behind": random(5, segments, least=-2), "left": random(4, segments),
              "line_row": random(9, lines, least=-1), "line_position": random(900, lines),
              "line_segment": random(segments, lines)}
    work = [random(3, count, FIELDS) for count in lists]
    for items in work:
        items[:, 3] = random(segments, len(items))
    length = random(900, 9)
    sides = []
    for call in (reference("move_step"), move_step):
        of, copies = Moving(*(part.clone().to(DEVICE) for part in places.values())), [x.clone().to(DEVICE) for x in work]
        for given in (length.to(DEVICE), None, None):
            call(of, copies, given)
            sides.append([x.clone().cpu() for x in (*of, *copies)])
    for wanted, found in zip(sides[:3], sides[3:], strict=True):
        assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
    assert not torch.equal(sides[0][1], sides[1][1]) or not (places["left"] > 1).any()
