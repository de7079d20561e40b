"""Builds a layer's view of a step from a plan and the rows. The only place that turns segments into flat arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.plan import StepPlan
from penstock.layers.step import GroupStep, Step
from penstock.worker.rows import Rows


def build(plan: StepPlan, rows: Rows, page: int) -> tuple[Step, npt.NDArray[np.int64]]:
    """The step, and the index among its T tokens of each segment's last one [S]."""
    counts = plan.counts.astype(np.int64)
    ends = np.cumsum(counts)
    query_start = np.zeros(len(counts) + 1, np.int32)
    query_start[1:] = ends
    segment = np.repeat(np.arange(len(counts)), counts)
    positions = (np.arange(ends[-1]) - (ends - counts)[segment] + plan.starts[segment]).astype(np.int32)
    row = plan.rows[segment].astype(np.int64)
    context = (plan.starts + plan.counts).astype(np.int32)
    columns = -(-int(context.max()) // page)
    index, inside = np.divmod(positions, page)
    device = rows.device

    def there(array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    groups = []
    for table in rows.tables:
        slots = table[row, index].astype(np.int64) * page + inside
        groups.append(GroupStep(there(np.ascontiguousarray(table[plan.rows, :columns])), there(slots)))
    at = there(positions)
    tokens = rows.tokens[there(row), at.long()].long()
    return Step(tokens, at, there(query_start), there(context), groups), ends - 1
