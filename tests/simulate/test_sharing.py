"""Shared prefixes as the worker finds them at every step of random workloads, compared with the rows' pages.

Scheduler and cache are real, and so are the worker's rows: hits that end within pages, forks, preemption, aborts, prompts in
chunks, loads that fail, layers that forget, and steps that are planned ahead all change the tables.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.core.plan import StepPlan, StepResult
from penstock.core.state import Everything
from penstock.worker.rows import Rows
from tests.sampling import sampled
from tests.simulate.test_simulate import Run, seen_in

WORKLOADS = 216
SHARDS = 8


class Watched(Run):
    """A workload whose plans the worker's rows take, too. Requests have many choices, because these give rows to others."""

    CHOICES = (1, 2, 4, 6)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        layout = self.worker.layout
        self.group = next((g for g, group in enumerate(layout.groups) if group.keep == Everything()), None)
        self.rows = Rows(self.limits.max_num_seqs, self.limits.max_model_len, layout.page, len(layout.groups),
                         torch.device("cpu"), self.group)
        self.began: dict[int, int] = {}
        """Of each row the pages that were full when it first decoded beside others."""
        self.members: list[int] = []
        self._run = self.worker.run
        self.worker.run = self.watch  # type: ignore[method-assign]

    def watch(self, plan: StepPlan) -> StepResult:
        self.rows.apply(plan)
        for row in [*plan.leave, *(enter.row for enter in plan.enter)]:
            self.began.pop(row, None)
        if self.group is not None:
            self.compare(plan, self.group)
        return self._run(plan)

    def compare(self, plan: StepPlan, group: int) -> None:
        sharing, page = self.rows.sharing, self.worker.layout.page
        assert sharing is not None
        prefixes = sharing.of(plan)
        segments = np.flatnonzero(plan.counts == 1).tolist()
        found: dict[tuple[int, int], int] = {}
        if prefixes is not None:
            members = prefixes.segments.tolist()
            assert len(set(members)) == len(members) == len(prefixes.common) + 1 and set(members) <= set(segments)
            assert prefixes.common.any() and not (prefixes.common % page).any()
            for i, one in enumerate(members):
                for j in range(i + 1, len(members)):
                    found[one, members[j]] = found[members[j], one] = int(prefixes.common[i:j].min())
        for segment in segments if len(plan.rows) > 1 else ():
            self.began.setdefault(int(plan.rows[segment]), int(plan.starts[segment]) // page)
        table = self.rows.tables[group]
        for i, one in enumerate(segments):
            for other in segments[:i]:
                rows, most = plan.rows[[one, other]], int(plan.starts[[one, other]].min()) // page
                same = table[rows[0], :most] == table[rows[1], :most]
                exact = most if same.all() else int(same.argmin())
                said = found.get((one, other), 0)
                assert said <= exact * page, f"{rows} share {exact * page} positions, not {said}"
                known = min(self.began.get(int(row), 0) for row in rows)
                assert said >= min(exact, known) * page, f"{rows} share {min(exact, known) * page} positions, not just {said}"
                self.seen["shared"] += said > 0
                self.seen["apart"] += exact == 0
        self.seen["steps"] += prefixes is not None
        if prefixes is not None and self.members != (now := plan.rows[prefixes.segments].tolist()):
            self.members = now
            self.seen["changes"] += 1


@pytest.mark.parametrize("shard", sampled(range(SHARDS), SHARDS))
def test_what_rows_share_is_what_their_tables_say(shard: int) -> None:
    seen = seen_in(Watched, range(shard * WORKLOADS // SHARDS, (shard + 1) * WORKLOADS // SHARDS))
    for what, least in (("shared", 400), ("apart", 500), ("steps", 150), ("changes", 50), ("preemptions", 25),
                        ("copies", 25), ("failed", 0)):
        assert seen[what] > least, f"the workloads do not strain what is shared: {seen}"
