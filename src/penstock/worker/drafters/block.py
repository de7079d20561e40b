"""Drafts by a block diffusion head (DFlash), which fills a block of mask tokens in one pass, each seeing all of the block.

The head has no pass over the context: for every token that the target has read, the target's hidden states, made one by a
matrix and a norm, give the keys and values of each of its layers. They follow the step, as other heads' entries do. DSpark is
the same with a bias of low rank on the logits of each slot, by the token before, so that slots are filled one after another."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from penstock.core.plan import StepPlan, Want
from penstock.layers.attention import Attention
from penstock.layers.decoder import Decoder
from penstock.models.draft_heads import BlockHead
from penstock.worker.drafting import Chooser, Drafter, Drafting, Host, LoadedDrafter, hide, part_of, parts, within
from penstock.worker.runner import Runner
from penstock.worker.sampler import LogitsRows
from penstock.worker.staging import upload
from penstock.worker.step import picks_of
from penstock.worker.verify import Verified

_BEFORE, _BIAS = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
"""DSpark's matrices [vocabulary, rank]: of the token before, and of the logits."""


class LoadedBlock(LoadedDrafter):
    """A head, loaded beside the target, whose embedding and last matrix it uses."""

    follows = True

    def __init__(self, model: Decoder, target: Decoder, head: BlockHead, room: int) -> None:
        """`room`: the most tokens of a padded step."""
        super().__init__(model)
        self.head = head
        self.extra = {name: tensor.to(model.device, model.dtype) for name, tensor in head.extra().items()}
        model.embedding, model.logits = target.embedding, target.logits
        target.tap(head.taps, room)

    def start(self, host: Host) -> Drafter:
        return Block(self.attached(host), self, host)


class Block(Drafter):
    """A block diffusion head on the rows of one worker."""

    def __init__(self, model: Decoder, loaded: LoadedBlock, host: Host) -> None:
        self._runner = Runner(model, host.rows, host.page)
        self._runner.graphs = host.capture(model)
        # The head follows the step, when lengths are new already.
        self._runner.begin_at(host.rows.before)
        self._host, self._head, self._extra = host, loaded.head, loaded.extra
        self._chooser = Chooser(host, model, self._runner.builder.size, bias=self._bias if _BEFORE in loaded.extra else None)

    def propose(self, drafting: Drafting) -> None:
        rows, plan, picked, count = self._host.rows, drafting.plan, drafting.segments, drafting.count
        if plan.rests:
            return
        rows.before.copy_(rows.length)
        if not len(picked):
            return
        # The slot of the last known token predicts the first draft, or nothing.
        first = 0 if self._head.anchored else 1
        width = count + first
        hide(drafting, width - 1, self._head.mask_token)
        for part in parts(width, self._host.budget):
            wide = width[part]
            segments, offset = np.repeat(picked[part], wide), within(wide)
            some = part_of(plan, segments, plan.starts[segments] + offset, np.ones(len(segments), np.int32), Want.SAMPLE)
            # Each slot is a segment of its own, so that it sees what is behind it.
            _, ends, lines = self._runner.forward(some, behind=-offset, reach=np.repeat(wide, wide) - 1 - offset)
            at = lines.position - first
            if _BEFORE not in self._extra:
                self._write(ends, lines.row, at, np.flatnonzero(offset >= first))
                continue
            for slot in range(first, int(wide.max())):
                self._write(ends, lines.row, at, np.flatnonzero(offset == slot))

    def _write(self, states: torch.Tensor, row: torch.Tensor, position: torch.Tensor, lines: npt.NDArray[np.int64]) -> None:
        """Chooses the tokens at these positions of rows from the hidden states of some lines."""
        at = upload(lines.astype(np.int32), states.device).long()
        self._chooser.write(states[at], row[at], position[at])

    def _bias(self, row: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        low = self._extra[_BEFORE][self._host.rows.tokens[row.long(), position.long() - 1].long()]
        return F.linear(low, self._extra[_BIAS])[:, :self._host.model.spec.vocab_size].float()

    def follow(self, plan: StepPlan, ends: torch.Tensor, lines: LogitsRows, verified: Verified | None) -> None:  # noqa: ARG002
        model, builder, picks = self._runner.model, self._runner.builder, picks_of(plan)
        bucket = builder.bucket(plan, len(picks.segments))
        step = builder.step(bucket, builder.fill(plan, bucket, picks))
        x = F.linear(self._host.model.tapped[:bucket.tokens], self._extra["fc.weight"])
        x = F.rms_norm(x.float(), x.shape[1:], self._extra["hidden_norm.weight"].float(), self._head.eps).to(x.dtype)
        for block in model.blocks:
            for mixer in block.mixers:
                if isinstance(mixer, Attention):
                    mixer.inject(x, step)
