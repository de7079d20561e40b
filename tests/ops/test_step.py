"""From segments to flat arrays: against the definition, with padding."""

from __future__ import annotations

import pytest
import torch

from penstock.ops.attention_work import FIELDS, WorkItem
from penstock.ops.registry import implementations
from penstock.ops.step import Moving, StepTensors
from tests.ops.kernels import reference


def _arrays(built: StepTensors) -> list[torch.Tensor]:
    return [built.tokens, built.positions, *(one for group in built.groups for one in (group.table, group.slots))]


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
    for table, group in zip(tables, built.groups, strict=True):
        assert group.slots.tolist() == [int(table[r, p // page]) * page + p % page for r, p in want] + [-1] * padding[1]
        assert torch.equal(group.table[:3], table[[5, 0, 3], :9])
    plain = reference("build_step")(known, tables, row, start, query_start, page, total + padding[1], 9)
    for found, wanted in zip(_arrays(built), _arrays(plain), strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)


def test_segments_move_to_where_they_begin_and_on() -> None:
    """Three segments: one whose start is known within two positions, one of three passes, and one of a single pass. Then a
    pass: the second alone goes on, and nothing more is chosen for the others."""
    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    of = Moving(row=ints(4, 2, 0), start=ints(20, 12, 7), context=ints(21, 13, 8), slack=ints(2, 0, 0), behind=ints(1, 0, 0),
                left=ints(1, 3, 1), line_row=ints(4, 2, 0, -1), line_position=ints(21, 13, 8, 0), line_segment=ints(0, 1, 2, 0))
    items = torch.zeros(4, FIELDS, dtype=torch.int32)
    items[:, WorkItem.SEGMENT], items[:, WorkItem.POSITION] = ints(0, 1, 2, 1), ints(20, 12, 7, 12)
    items[3, WorkItem.LISTED], items[:, WorkItem.QUERIES] = 1, 2
    reference("move_step")(of, [items], ints(0, 0, 0, 0, 20))
    assert of.start.tolist() == [18, 10, 7] and of.context.tolist() == [19, 11, 8]
    assert of.line_position.tolist()[:3] == [19, 11, 8] and items[:, WorkItem.POSITION].tolist() == [18, 10, 7, 12]
    for passed in (1, 2):
        reference("move_step")(of, [items], None)
        assert of.start.tolist() == [18, 10 + passed, 7] and of.line_position.tolist()[:3] == [19, 11 + passed, 8]
        assert of.line_row.tolist() == [-1, 2, -1, -1] and items[:, WorkItem.POSITION].tolist() == [18, 10 + passed, 7, 12]
    reference("move_step")(of, [items], None)
    assert of.start.tolist() == [18, 12, 7] and of.line_row.tolist() == [-1] * 4
