"""Draft trees: which candidates are planted, and which path is accepted."""

from __future__ import annotations

import numpy as np
import torch

from penstock.core.plan import Enter, StepPlan, Want
from penstock.core.sampling import SamplingParams
from penstock.ops.sample import SampleOps
from penstock.worker.drafting import Drafting
from penstock.worker.rows import Rows
from penstock.worker.sampler import LogitsRows
from penstock.worker.trees import Growth, Trees

LOGITS = {1: [0.0, 2.0, 1.0, -9.0], 2: [-torch.inf, -torch.inf, 3.0, -torch.inf], 3: [0.0, 0.0, 0.0, 5.0]}
"""By level. At the second there is one candidate alone."""


def _planted(count: int) -> tuple[Trees, Rows]:
    rows = Rows(1, 40, 16, 1, torch.device("cpu"))
    enter = Enter(0, [9, 9, 9], 3, SamplingParams(temperature=0), 0, [])
    rows.apply(StepPlan(0, enter=[enter], edits=[np.zeros((0, 3), np.int32)]))
    plan = StepPlan(1, rows=np.array([0], np.int32), starts=np.array([2], np.int32), counts=np.array([1 + count], np.int32),
                    wants=np.array([int(Want.SAMPLE | Want.EACH)], np.int32))
    trees, drafting = Trees(rows, SampleOps(), 2, 3, 8), Drafting(plan, rows)
    trees.begin(plan)
    parts = list[tuple[Growth, Drafting]]()
    chain = trees.split(drafting, lambda *found: parts.append(found))
    (growth, whole), = parts
    assert len(whole.segments) == 1 and not len(chain.segments)
    states = torch.zeros(1, 1)
    for level in (1, 2, 3):
        growth.grow(states, lambda x, level=level: torch.tensor([LOGITS[level]]).expand(len(x), -1))  # type: ignore[misc]
    growth.plant()
    return trees, rows


def test_the_best_candidates_are_planted_parents_first_and_none_that_is_no_token() -> None:
    trees, rows = _planted(8)
    bits, parent, depth = (table[0, :8].tolist() for table in (trees._bits, trees._parent, trees._depth))
    tokens = rows.tokens[0, 3:11].tolist()
    known = [(token, up, deep) for token, up, deep in zip(tokens, parent, depth, strict=True) if deep]
    assert known[:4] == [(1, 0, 1), (2, 0, 1), (2, 1, 2), (2, 2, 2)] and {deep for _, _, deep in known[4:]} == {3}
    for at, (own, up) in enumerate(zip(bits, parent, strict=True)):
        assert own == 1 << at | (bits[up - 1] if up else 0) and own < 1 << 8, "no bit is of a slot beyond the tree"


def test_the_targets_own_choices_are_walked() -> None:
    trees, rows = _planted(8)
    positions = 3 + np.array([0, *trees._depth[0, :8].tolist()], np.int32)
    line = np.zeros(9, np.int32)
    lines = LogitsRows(line.astype(np.int64), line, positions, torch.from_numpy(line), torch.from_numpy(positions.copy()))
    drafts = trees.drafts(lines)
    chosen = torch.zeros(9, dtype=torch.int32)
    chosen[0], chosen[2], chosen[4] = 2, 2, 3
    order, kept = trees.walk(lines, drafts, chosen)
    assert order[:3].tolist() == [0, 2, 4] and sorted(order.tolist()) == list(range(9))
    below = [at + 1 for at in range(8) if int(trees._parent[0, at]) == 4 and int(rows.tokens[0, 3 + at]) >= 0]
    assert kept.tolist() == [4 if any(int(drafts[at - 1]) == 3 for at in below) else 3]
    assert rows.tokens[0, 3:6].tolist() == [2, 2, 3]
