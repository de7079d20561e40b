"""Drafts by a block diffusion head (DFlash), which fills a block of mask tokens in one pass, each seeing all of the block.

The head has no pass over the context: for every token that the target has read, the target's hidden states, made one by a
matrix and a norm, give the keys and values of each of its layers. They follow the step, as other heads' entries do. DSpark is
the same with a bias of low rank on the logits of each slot, by the token before, so that slots are filled one after another,
and with a matrix that estimates how likely each draft is kept if those before it are (its confidence head)."""

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from penstock.core.plan import StepPlan, Want
from penstock.layers.attention import Attention
from penstock.layers.decoder import Decoder
from penstock.models.draft_heads import EXTRA, BlockHead
from penstock.worker.drafting import Chooser, Drafter, Drafting, Host, LoadedDrafter, hide, part_of, parts, within
from penstock.worker.graphs import Runner
from penstock.worker.rows import upload
from penstock.worker.sampler import LogitsRows
from penstock.worker.step import picks_of
from penstock.worker.verify import Verified

_BEFORE, _BIAS = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
"""DSpark's matrices [vocabulary, rank]: of the token before, and of the logits."""
_CHANCE = "confidence_head.proj."
"""DSpark's estimate, a matrix [1, width] or [1, width + rank] and perhaps a bias: of a slot's state and of the token before."""


class LoadedBlock(LoadedDrafter):
    """A head, loaded beside the target, whose embedding and last matrix it uses."""

    follows = True

    def __init__(self, model: Decoder, target: Decoder, head: BlockHead, room: int) -> None:
        """`room`: the most tokens of a padded step."""
        super().__init__(model)
        self.head = head
        self.extra = {name: tensor.to(model.device, model.dtype) for name, tensor in head.own(*EXTRA).items()}
        model.embedding, model.logits = target.lent, target.logits
        target.tap(head.taps, room)

    def start(self, host: Host) -> Drafter:
        return Block(self.attached(host), self, host)


class Block(Drafter):
    def __init__(self, model: Decoder, loaded: LoadedBlock, host: Host) -> None:
        self._runner = Runner(model, host.rows, host.page, host.capture(model))
        # The head follows the step, when lengths are new already.
        self._runner.begin_at(host.rows.before)
        self._host, self._head, self._extra = host, loaded.head, loaded.extra
        self._chooser = Chooser(host, model, self._runner.builder.size, bias=self._bias if _BEFORE in loaded.extra else None)

    def propose(self, drafting: Drafting) -> torch.Tensor | None:
        plan, picked, count = drafting.plan, drafting.segments, drafting.count
        if not len(picked):
            return None
        # The slot of the last known token predicts the first draft, or nothing.
        first = 0 if self._head.anchored else 1
        width = count + first
        hide(drafting, width - 1, self._head.mask_token)
        chances: list[torch.Tensor] = []
        for part in parts(width, self._host.budget):
            wide = width[part]
            segments, offset = np.repeat(picked[part], wide), within(wide)
            some = part_of(plan, segments, plan.starts[segments] + offset, np.ones(len(segments), np.int32), Want.SAMPLE)
            # Each slot is a segment of its own, so that it sees what is behind it.
            _, ends, lines = self._runner.forward(some, behind=-offset, reach=np.repeat(wide, wide) - 1 - offset)
            at = lines.position - first
            one_by_one = _BEFORE in self._extra
            for mine in [offset == slot for slot in range(first, int(wide.max()))] if one_by_one else [offset >= first]:
                self._chooser.write(*_of(mine, ends, lines.row, at))
            if f"{_CHANCE}weight" in self._extra:
                chances.append(self._chances(*_of(offset >= first, ends, lines.row, at)))
        return torch.cat(chances) if chances else None

    def _before(self, row: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """[L, rank] of the tokens before these positions of rows."""
        return self._extra[_BEFORE][self._host.rows.tokens[row.long(), position.long() - 1].long()]

    def _bias(self, row: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return F.linear(self._before(row, position), self._extra[_BIAS])[:, :self._host.model.spec.vocab_size].float()

    def _chances(self, states: torch.Tensor, row: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """[L] the probabilities that drafts at these positions of rows are kept, from the states of their slots."""
        weight = self._extra[f"{_CHANCE}weight"]
        if weight.shape[1] > states.shape[1]:
            states = torch.cat((states, self._before(row, position)), 1)
        return F.linear(states, weight, self._extra.get(f"{_CHANCE}bias")).float().sigmoid()[:, 0]

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


def _of(mine: npt.NDArray[np.bool_], *values: torch.Tensor) -> list[torch.Tensor]:
    """These values [L] of some of the lines."""
    at = upload(np.flatnonzero(mine).astype(np.int32), values[0].device).long()
    return [value[at] for value in values]
