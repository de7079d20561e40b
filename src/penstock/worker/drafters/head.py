"""Drafts by a head that reads the target's hidden states: EAGLE's, or a layer for multi-token prediction.

The head follows the target through each step: once a step's tokens are chosen, it runs on the step's own segments, each
position with the target's hidden state there and the token that follows. Its result after the last token of a row is kept for
the next step, which begins with the drafts. Its cache entries are further states of the target's pages, as a draft model's."""

import torch

from penstock.core.plan import StepPlan, Want
from penstock.layers.decoder import Decoder
from penstock.layers.draft_head import Join
from penstock.layers.step import Step
from penstock.models.draft_heads import DraftHead
from penstock.worker.drafters.model import Chain
from penstock.worker.drafting import Chooser, Drafter, Drafting, Host, LoadedDrafter, hide, last_of, part_of, parts
from penstock.worker.graphs import Runner
from penstock.worker.sampler import LogitsRows
from penstock.worker.trees import Growth
from penstock.worker.verify import Verified


class LoadedHead(LoadedDrafter):
    follows = True

    def __init__(self, model: Decoder, target: Decoder, head: DraftHead, room: int) -> None:
        """`room`: the most tokens of a padded step."""
        super().__init__(model)
        tokens = head.targets()
        self.tokens = None if tokens is None else (slice(None), tokens.to(model.device))
        self.normed, masks = head.normed, head.masks()
        assert isinstance(model.embedding, Join)
        self.masks = None if masks is None else (masks[0], model.embedding.reduce(masks[1].to(model.device, model.dtype)[None]))
        """The mask token and the state [1, width] that goes with it."""
        if not model.embedding.spec.tokens:
            assert target.lent is not None
            model.embedding.embed = target.lent
        if model.logits is None:
            model.logits = target.logits
        # At one address from now on, where graphs find them.
        target.tap(head.taps, room)
        model.entry(room)

    def start(self, host: Host) -> Drafter:
        return Head(self.attached(host), self, host)


class Head(Drafter):
    def __init__(self, model: Decoder, loaded: LoadedHead, host: Host) -> None:
        self._runner = Runner(model, host.rows, host.page, host.capture(model))
        self._host = host
        self._chooser = Chooser(host, model, self._runner.builder.size, loaded.tokens)
        self._normed, self._masks = loaded.normed, loaded.masks
        self._last = torch.zeros(len(host.rows.tokens), model.spec.width, dtype=model.dtype, device=model.device)
        """[row] the head's result where it predicts the token behind the row's last known one."""
        self._chain = Chain(self._runner, self._further, host)

    def propose(self, drafting: Drafting) -> None:
        drafting = self._host.chains(drafting, self._grow)
        plan, picked, count = drafting.plan, drafting.segments, drafting.count
        if not len(picked):
            return
        states = self._last[drafting.row.long()]
        if self._masks is not None:
            self._at_once(drafting, *self._masks)
        self._chooser.write(states, drafting.row, drafting.length)
        if self._masks is None:
            self._enter(states)
            self._chain.run(plan, picked, count - 1)

    def _further(self, step: Step, row: torch.Tensor, position: torch.Tensor) -> None:
        """Reads one draft of each row, with the head's result that predicted it, and writes the next one."""
        ends = self._runner.model.forward(step)
        self._chooser.write(ends, row, position)
        self._enter(ends)

    def _grow(self, growth: Growth, drafting: Drafting) -> None:
        growth.follow(self._runner, 0, self._last[drafting.row.long()], self._chooser.logits, self._enter)

    def _at_once(self, drafting: Drafting, mask: int, state: torch.Tensor) -> None:
        """Drafts all tokens but the first in one pass, each in the place of a mask token with a learned state (P-EAGLE)."""
        plan, picked, more = drafting.plan, drafting.segments, drafting.count - 1
        hide(drafting, more, mask)
        picked, more = picked[more > 0], more[more > 0]
        for part in parts(more, self._host.budget):
            some = part_of(plan, picked[part], plan.starts[picked[part]], more[part], Want.SAMPLE | Want.EACH)
            self._runner.model.entry(int(some.counts.sum())).copy_(state)
            _, ends, lines = self._runner.forward(some, behind=0 * more[part])
            self._chooser.write(ends[:len(lines.rows)], lines.row, lines.position)

    def _enter(self, states: torch.Tensor) -> None:
        """Has the next pass read its own results [L, width] beside the tokens."""
        norm = self._runner.model.norm if self._normed else None
        self._runner.model.entry(len(states)).copy_(states if norm is None else norm(states))

    def follow(self, plan: StepPlan, ends: torch.Tensor, lines: LogitsRows, verified: Verified | None) -> None:
        model, tokens = self._runner.model, int(plan.counts.sum())
        size = self._runner.builder.size(tokens)
        assert isinstance(model.embedding, Join)
        model.entry(size).copy_(model.embedding.reduce(self._host.model.tapped[:size]))
        _, ends, _ = self._runner.forward(plan)
        row, states = last_of(ends, lines, verified)
        self._last[row] = states
