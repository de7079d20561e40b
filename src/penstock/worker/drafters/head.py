"""Drafts by a head that reads the target's hidden states: EAGLE's, or a layer for multi-token prediction.

The head follows the target through each step: once a step's tokens are chosen, it runs on the step's own segments, each
position with the target's hidden state there and the token that follows. Its result after the last token of a row is kept for
the next step, which begins with the drafts. Its cache entries are further states of the target's pages, as a draft model's are.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from penstock.core.plan import StepPlan, Want
from penstock.layers.decoder import Decoder
from penstock.layers.draft_head import Join
from penstock.worker.drafting import Drafter, Drafting, Host, LoadedDrafter, hide, last_of, part_of, parts
from penstock.worker.runner import Runner
from penstock.worker.sampler import MAX_LOGITS_ROWS, LogitsRows
from penstock.worker.staging import upload
from penstock.worker.trees import Growth
from penstock.worker.verify import Verified


class LoadedHead(LoadedDrafter):
    """A head, loaded beside the target."""

    follows = True

    def __init__(self, model: Decoder, target: Decoder, taps: tuple[int, ...], tokens: torch.Tensor | None, normed: bool,
                 room: int, masks: tuple[int, torch.Tensor] | None = None) -> None:
        """`taps`, `tokens`, `normed`, `masks`: as in `models/draft_heads.py::DraftHead`. `room`: of a padded step."""
        super().__init__(model)
        self._tokens = None if tokens is None else tokens.to(model.device)
        self._normed = normed
        self._masks = masks
        assert isinstance(model.embedding, Join)
        if not model.embedding.spec.tokens:
            assert target.embedding is not None
            model.embedding.embed = target.embedding
        if model.logits is None:
            model.logits = target.logits
        # At one address from now on, where graphs find them.
        target.tap(taps, room)
        model.entry(room)

    def start(self, host: Host) -> Drafter:
        return Head(self.attached(host), self._tokens, self._normed, self._masks, host)


class Head(Drafter):
    """A head on the rows of one worker."""

    def __init__(self, model: Decoder, tokens: torch.Tensor | None, normed: bool,
                 masks: tuple[int, torch.Tensor] | None, host: Host) -> None:
        self._runner = Runner(model, host.rows, host.page)
        self._runner.graphs = host.capture(model)
        self._host = host
        self._tokens = tokens
        self._normed = normed
        assert isinstance(model.embedding, Join)
        self._masks: tuple[int, torch.Tensor] | None = None
        """The mask token and the state [1, width] that goes with it."""
        if masks is not None:
            self._masks = masks[0], model.embedding.reduce(masks[1].to(model.device, model.dtype)[None])
        self._last = torch.zeros(len(host.rows.tokens), model.spec.width, dtype=model.dtype, device=model.device)
        """[row] the head's result where it predicts the token behind the row's last known one."""

    def propose(self, drafting: Drafting) -> None:
        rows, plan, picked, count = self._host.rows, drafting.plan, drafting.segments, drafting.count
        rows.before.copy_(rows.length)
        if not len(picked):
            return
        if self._host.trees is not None:
            whole, drafting = self._host.trees.split(drafting)
            if len(whole.segments):
                growth = Growth(self._host.trees, whole, self._host.model.kernels.sample)
                growth.follow(self._runner, 0, self._last[whole.row.long()], self._logits, self._enter)
            picked, count = drafting.segments, drafting.count
            if not len(picked):
                return
        states = self._last[drafting.row.long()]
        if self._masks is not None:
            self._at_once(drafting, *self._masks)
        self._write(states, drafting.row, drafting.length)
        if self._masks is not None:
            return
        for place in range(1, int(count.max())):
            still = count > place
            if not still.all():
                states = states[upload(np.flatnonzero(still).astype(np.int32), states.device).long()]
                picked, count = picked[still], count[still]
            states = self._draft(plan, picked, place, states)

    def _draft(self, plan: StepPlan, picked: npt.NDArray[np.int64], place: int, states: torch.Tensor) -> torch.Tensor:
        """Reads the draft before number `place` of these segments, with the head's results [segments] that predicted it, and
        writes the next one. Returns its own results."""
        one = np.ones(len(picked), np.int32)
        self._enter(states)
        _, ends, lines = self._runner.forward(part_of(plan, picked, plan.starts[picked] + (place - 1), one, Want.SAMPLE),
                                             behind=(1 - place) * one)
        self._write(ends[:len(picked)], lines.row, lines.position)
        return ends[:len(picked)].clone()

    def _at_once(self, drafting: Drafting, mask: int, state: torch.Tensor) -> None:
        """Drafts all tokens but the first in one pass, each in the place of a mask token with a learned state (P-EAGLE)."""
        plan, picked, more = drafting.plan, drafting.segments, drafting.count - 1
        hide(drafting, more, mask)
        picked, more = picked[more > 0], more[more > 0]
        for part in parts(more, self._host.budget):
            some = part_of(plan, picked[part], plan.starts[picked[part]], more[part], Want.SAMPLE | Want.EACH)
            self._runner.model.entry(int(some.counts.sum())).copy_(state)
            _, ends, lines = self._runner.forward(some, behind=0 * more[part])
            self._write(ends[:len(lines.rows)], lines.row, lines.position)

    def _again(self, states: torch.Tensor) -> torch.Tensor:
        """The head's results as it reads them in place of the target's."""
        norm = self._runner.model.norm
        return norm(states) if self._normed and norm is not None else states

    def _write(self, states: torch.Tensor, row: torch.Tensor, position: torch.Tensor) -> None:
        """Chooses the tokens that follow results [L], and writes them to their rows."""
        for at in range(0, len(states), MAX_LOGITS_ROWS):
            some = slice(at, at + MAX_LOGITS_ROWS)
            self._host.choose(self._logits(states[some]), row[some], position[some])

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits of the target's vocabulary that follow from results [L, width], L at most MAX_LOGITS_ROWS."""
        model, target, size = self._runner.model, self._host.model, len(states)
        padded = F.pad(states, (0, 0, 0, self._runner.builder.size(size) - size))
        # Its head is the target's, or its own.
        whole = target.whole if model.logits is target.logits else model.whole
        # Entries that were never computed may hold anything, but a draft must be a token.
        logits = torch.nan_to_num(whole(model.head(padded))[:size])
        if self._tokens is not None:
            logits = logits.new_full((size, target.spec.vocab_size), -torch.inf).index_copy_(1, self._tokens, logits)
        return logits[:, :target.spec.vocab_size].contiguous()

    def _enter(self, states: torch.Tensor) -> None:
        """Has the next pass read its own results [L, width] beside the tokens."""
        self._runner.model.entry(len(states)).copy_(self._again(states))

    def follow(self, plan: StepPlan, ends: torch.Tensor, lines: LogitsRows, verified: Verified | None) -> None:
        model, tokens = self._runner.model, int(plan.counts.sum())
        size = self._runner.builder.size(tokens)
        assert isinstance(model.embedding, Join)
        model.entry(size).copy_(model.embedding.reduce(self._host.model.tapped[:size]))
        _, ends, _ = self._runner.forward(plan)
        row, states = last_of(ends, lines, verified)
        self._last[row] = states
