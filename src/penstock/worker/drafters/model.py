"""Drafts by a small model with the same tokenizer, one token after another.

Its cache entries are further states of the target's pages, so that allocation, prefix cache, tiers and preemption treat both
alike. It samples with the parameters, seeds and positions of the rows: the noise of sampling depends on (seed, position) alone,
so that at a temperature above 0 both models draw the same token wherever their distributions allow it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.plan import Ints, StepPlan, Want
from penstock.core.state import Everything, StateSpec, Window
from penstock.layers.decoder import Decoder
from penstock.layers.embedding import Embedding
from penstock.worker.drafters.translation import Translation
from penstock.worker.drafting import Chooser, Drafter, Drafting, Host, LoadedDrafter, hide, part_of, parts, within
from penstock.worker.runner import Runner
from penstock.worker.sampler import LogitsRows
from penstock.worker.staging import upload
from penstock.worker.trees import Growth, Trees

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

    def __init__(self, model: Decoder, mask: int | None = None, translation: Translation | None = None) -> None:
        """`mask`: the token in whose place the model predicts one, if it drafts all tokens in one pass. `translation`: from the
        target's tokenizer to the model's, if that is another."""
        super().__init__(model)
        self._mask = mask
        self._tokens: tuple[torch.Tensor, torch.Tensor] | None = None
        if translation is not None:
            assert isinstance(model.embedding, Embedding)
            model.embedding.reads = translation.reads.to(model.device)
            self._tokens = translation.own.to(model.device), translation.targets.to(model.device)

    def start(self, host: Host) -> Drafter:
        model = self.attached(host)
        return DraftModel(model, host, self._tokens) if self._mask is None else ParallelModel(model, host, self._mask)


class DraftModel(Drafter):
    """A draft model on the rows of one worker."""

    def __init__(self, model: Decoder, host: Host, tokens: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
        """`tokens`: as in `Chooser`."""
        self._runner = Runner(model, host.rows, host.page)
        self._chooser = Chooser(host, model, self._runner.builder.size, tokens)
        self._runner.graphs = host.capture(model)
        self._host = host
        self._budget = host.budget
        self._lag = lag(model.states)
        # The model makes up for so many positions behind a rest. Pages that a window has left may have been given back.
        self._backlog = self._lag if any(isinstance(state.keep, Window) for state in model.states) else self._budget - 1
        self._behind = np.zeros(len(host.rows.tokens), np.int32)
        """[row] positions before the row's last known token whose entries are missing."""

    def propose(self, drafting: Drafting) -> None:
        plan, picked = drafting.plan, drafting.segments
        self._behind[[enter.row for enter in plan.enter]] = 0
        if plan.rests:
            self._behind[plan.rows] = np.minimum(self._behind[plan.rows] + plan.counts, self._backlog)
            return
        self._follow(plan, np.setdiff1d(np.arange(len(plan.rows)), picked))
        if not len(picked):
            return
        if self._host.trees is not None:
            drafting = self._host.trees.split(drafting, partial(self._grow, self._host.trees))
        if len(drafting.segments):
            self._first(drafting, self._missing(plan, drafting.segments))

    def _grow(self, trees: Trees, drafting: Drafting) -> None:
        """Drafts trees for the segments. The entries of their drafts are not where those of kept tokens belong."""
        plan, picked = drafting.plan, drafting.segments
        behind = self._missing(plan, picked)
        states = torch.cat([ends[:len(lines.rows)].clone()
                            for _, ends, lines in self._over(plan, picked, behind, behind + 1, Want.SAMPLE)])
        Growth(trees, drafting, self._host.model.kernels.sample).follow(self._runner, 1, states, self._chooser.logits)
        self._behind[plan.rows[picked]] = trees.levels

    def _missing(self, plan: StepPlan, picked: npt.NDArray[np.int64]) -> Ints:
        """The positions that the model is behind in these segments, at most to the beginnings of their rows."""
        sure = plan.starts[picked] if plan.slack is None else plan.starts[picked] - plan.slack[picked]
        return np.minimum(self._behind[plan.rows[picked]], sure)

    def _first(self, drafting: Drafting, behind: Ints) -> None:
        """Drafts for the segments, after reading what the model is `behind`."""
        plan, picked, count = drafting.plan, drafting.segments, drafting.count
        for _, ends, lines in self._over(plan, picked, behind, behind + 1, Want.SAMPLE):
            self._chooser.write(ends, lines.row, lines.position)
        for place in range(1, int(count.max())):
            still = picked[count > place]
            one = np.ones(len(still), np.int32)
            for _, ends, lines in self._over(plan, still, -place * one, one, Want.SAMPLE):
                self._chooser.write(ends, lines.row, lines.position)
        # If all drafts are kept, the last of them was never an input of the draft model.
        self._behind[plan.rows[picked]] = 1

    def _follow(self, plan: StepPlan, others: npt.NDArray[np.int64]) -> None:
        """Reads the segments that are not drafted for: prompts at once, single tokens several at a time."""
        rows, behind = plan.rows[others], np.minimum(self._missing(plan, others), self._budget - plan.counts[others])
        due = (plan.counts[others] > 1) | (behind + 1 >= self._lag)
        self._behind[rows] = np.where(due, 0, behind + 1)
        picked, behind = others[due], behind[due]
        for _ in self._over(plan, picked, behind, plan.counts[picked] + behind, Want.NOTHING):
            pass

    def _over(self, plan: StepPlan, picked: npt.NDArray[np.int64], behind: Ints, counts: Ints,
              want: Want) -> Iterator[tuple[slice, torch.Tensor, LogitsRows]]:
        """Reads so many tokens of these segments' rows, from so many before the last known ones on: yields some of the
        segments at a time, the hidden states of their logits rows, and those."""
        for part in parts(counts, self._budget):
            some = part_of(plan, picked[part], plan.starts[picked[part]] - behind[part], counts[part], want)
            _, ends, lines = self._runner.forward(some, behind=behind[part])
            yield part, ends, lines


class ParallelModel(DraftModel):
    """A draft model that was trained to predict several tokens in one pass (PARD, An et al. 2025): behind the last known token
    it reads mask tokens, and each predicts the token after its own place. The masks' cache entries are of no use, so that the
    next pass begins where this one did."""

    def __init__(self, model: Decoder, host: Host, mask: int) -> None:
        super().__init__(model, host)
        self._mask = mask

    def _first(self, drafting: Drafting, behind: Ints) -> None:
        plan, picked, count = drafting.plan, drafting.segments, drafting.count
        hide(drafting, count - 1, self._mask)
        whole = behind + count
        for part, ends, lines in self._over(plan, picked, behind, whole, Want.SAMPLE | Want.EACH):
            at = np.flatnonzero(within(whole[part]) >= np.repeat(behind[part], whole[part])).astype(np.int32)
            drafted = upload(at, ends.device).long()
            self._chooser.write(ends[drafted], lines.row[drafted], lines.position[drafted])
        self._behind[plan.rows[picked]] = count
