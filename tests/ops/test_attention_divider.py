"""A decode step's division moved on from the last one is the one that would be made anew."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from penstock.ops import attention_work
from penstock.ops.attention import Geometry, Ints, SharedPrefixes
from penstock.ops.attention_divider import Divider
from penstock.ops.attention_work import FIELDS

GEOMETRY = Geometry(16, 8, 128, 16)


def items(work: Ints, geometry: Geometry, segments: int, invariant: bool) -> tuple[list[tuple[int, ...]], list[int]]:
    """The items in an order of their own, and all else."""
    launch = attention_work.layout(geometry, segments, segments, invariant).narrow
    end = launch.offset + launch.items * FIELDS
    return sorted(map(tuple, work[launch.offset:end].reshape(-1, FIELDS).tolist())), work[end:].tolist()


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("rows, segments, most", [(1, 1, 700), (3, 4, 3000), (8, 8, 300), (40, 48, 5000), (200, 208, 400)])
def test_moved_on_equals_made_anew(rows: int, segments: int, most: int, window: int, invariant: bool) -> None:
    random = np.random.default_rng(rows + window)
    geometry = dataclasses.replace(GEOMETRY, window=window)
    made = 0

    def divide(counts: Ints, context: Ints, segments: int, tokens: int, *, shared: SharedPrefixes | None) -> Ints:
        nonlocal made
        made += 1
        return attention_work.prepare(geometry, counts, context, segments, tokens, invariant, (), shared)

    divider = Divider(geometry, invariant, divide)
    counts, steps = np.ones(rows, np.int32), 150
    context = random.integers(1, most, rows).astype(np.int32)
    shared = None
    if rows == 40 and not window:
        shared = SharedPrefixes(np.arange(rows, dtype=np.int32), np.full(rows - 1, 512, np.int32))
    if shared is not None:
        context += 513
    for step in range(steps):
        found = divider.decode(counts, context, segments, shared)
        anew = attention_work.prepare(geometry, counts, context, segments, segments, invariant, (), shared)
        assert items(found, geometry, segments, invariant) == items(anew, geometry, segments, invariant), (step, context)
        context = context + 1
        if step % 40 == 39:
            # Another sequence takes a row: nothing of the last step holds.
            context[random.integers(rows)] = 600 + random.integers(1, most)
    assert made < steps / 10 if rows == 1 and not window else made <= steps
