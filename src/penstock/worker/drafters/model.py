"""Drafts by a small model with the same tokenizer, one token after another.

Its cache entries are further states of the target's pages, so that allocation, prefix cache, tiers and preemption treat both
alike. It samples with the parameters, seeds and positions of the rows: the noise of sampling depends on (seed, position) alone,
so that at a temperature above 0 both models draw the same token wherever their distributions allow it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.plan import Ints, StepPlan, Want
from penstock.core.state import Everything, StateSpec, Window
from penstock.layers.decoder import Decoder
from penstock.worker.drafting import Drafter, Drafting, Host, LoadedDrafter, part_of
from penstock.worker.runner import Runner
from penstock.worker.sampler import MAX_LOGITS_ROWS

_BEHIND = 16
"""Single tokens that the draft model may lag behind a row that is not drafted for: it then reads all of them at once."""


def lag(states: Sequence[StateSpec]) -> int:
    """Returns how far a model with these states may lag behind a row: it still writes entries there, whose pages must not have
    been given back. 0 if it cannot draft."""
    widths = [state.keep.width for state in states if isinstance(state.keep, Window)]
    if any(not isinstance(state.keep, Everything | Window) for state in states):
        return 0
    most = min((_BEHIND, *(width - 2 for width in widths)))
    return most if most >= 3 else 0


class LoadedDraftModel(LoadedDrafter):
    """A small model, loaded beside the target."""

    def start(self, host: Host) -> Drafter:
        return DraftModel(self.attached(host), host)


class DraftModel(Drafter):
    """A draft model on the rows of one worker."""

    def __init__(self, model: Decoder, host: Host) -> None:
        self._runner = Runner(model, host.rows, host.page)
        self._runner.graphs = host.capture(model)
        self._sampler = host.sampler
        self._vocabulary = host.model.spec.vocab_size
        self._budget = host.budget
        self._lag = lag(model.states)
        self._behind = np.zeros(len(host.rows.tokens), np.int32)
        """[row] positions before the row's last known token whose entries are missing."""

    def propose(self, drafting: Drafting) -> None:
        plan, picked = drafting.plan, drafting.segments
        self._behind[[enter.row for enter in plan.enter]] = 0
        self._follow(plan, np.setdiff1d(np.arange(len(plan.rows)), picked))
        if not len(picked):
            return
        rows, count = plan.rows[picked], drafting.count
        behind = self._behind[rows]
        self._draft(plan, picked, plan.starts[picked] - behind, behind + 1, behind)
        for place in range(1, int(count.max())):
            still = picked[count > place]
            one = np.ones(len(still), np.int32)
            self._draft(plan, still, plan.starts[still] + place, one, -place * one)
        # If all drafts are kept, the last of them was never an input of the draft model.
        self._behind[rows] = 1

    def _follow(self, plan: StepPlan, others: npt.NDArray[np.int64]) -> None:
        """Reads the segments that are not drafted for: prompts at once, single tokens several at a time."""
        rows = plan.rows[others]
        behind = self._behind[rows]
        due = (plan.counts[others] > 1) | (behind + 1 >= self._lag)
        self._behind[rows] = np.where(due, 0, behind + 1)
        picked, behind = others[due], behind[due]
        for part in self._parts(plan.counts[picked] + behind):
            self._runner.forward(part_of(plan, picked[part], plan.starts[picked[part]] - behind[part],
                                      plan.counts[picked[part]] + behind[part], Want.NOTHING), behind=behind[part])

    def _draft(self, plan: StepPlan, picked: npt.NDArray[np.int64], starts: Ints, counts: Ints, behind: Ints) -> None:
        """Reads a segment of each row, and writes the token that follows it to the row."""
        for part in self._parts(counts):
            _, ends, lines = self._runner.forward(part_of(plan, picked[part], starts[part], counts[part], Want.SAMPLE),
                                                 behind=behind[part])
            for at, some in enumerate(lines.parts(MAX_LOGITS_ROWS)):
                states = ends[at * MAX_LOGITS_ROWS:(at + 1) * MAX_LOGITS_ROWS]
                logits = self._runner.model.head(states)[:len(some.rows), :self._vocabulary]
                # Entries that were never computed may hold anything, but a draft must be a token.
                self._sampler.choose(torch.nan_to_num(logits), some.row, some.position)

    def _parts(self, counts: Ints) -> Iterator[slice]:
        """Divides segments of so many tokens into runs within the budget."""
        first, total = 0, 0
        for at, count in enumerate(counts.tolist()):
            if total and total + count > self._budget:
                yield slice(first, at)
                first, total = at, 0
            total += count
        if total:
            yield slice(first, len(counts))
