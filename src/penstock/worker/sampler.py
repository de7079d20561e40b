"""Chooses tokens from logits: decides which of the operations in `ops/sample.py` a step needs, and launches them.

A row's choice depends on its own logits, parameters, seed and position alone.

Order, as in vLLM: masks, edits (allowed tokens, bias, bad words, minimum length), penalties, temperature, min_p, top_k, top_p,
draw.
Reported log probabilities are those of the model's own logits, before all of that.

Nothing here waits for the device: what the host wants to know is on its way when `launch` returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.plan import Ints
from penstock.ops.sample import Feature, SampleOps
from penstock.worker.rows import Rows
from penstock.worker.scoring import Scores
from penstock.worker.staging import Outbox, Staging, to_host

_EDITED = int(Feature.EDIT | Feature.ALLOWED)
_CHANGED = _EDITED | int(Feature.PENALTY)
_MORE = ~int(Feature.RANDOM)


@dataclass(slots=True)
class Lines:
    """Whose logits a step's S lines are: on the host, and the same on the device."""

    segments: npt.NDArray[np.int64]
    """Which of the plan's segments."""
    rows: Ints
    positions: Ints
    """Where the sampled tokens will stand."""
    row: torch.Tensor
    """[S] int32."""
    position: torch.Tensor
    """[S] int32."""

    def parts(self, most: int) -> Iterator[Lines]:
        """The lines in order, `most` at a time."""
        for at in range(0, len(self.rows), most):
            part = slice(at, at + most)
            yield Lines(self.segments[part], self.rows[part], self.positions[part], self.row[part], self.position[part])


class LineMasks(NamedTuple):
    """Masks of some of a step's lines."""

    bits: Ints
    """[L, words], as in core/plan.py::Masks."""
    lines: npt.NDArray[np.int64]
    """[L], which lines."""


LINES = 256
"""Rows that are sampled at a time: logits, as wide as the vocabulary, would be the largest tensors of a step of more."""


class Sampled:
    """Chosen tokens. They may be read once the device has passed `Sampler.launch`."""

    def __init__(self, tokens: torch.Tensor, scores: Scores | None) -> None:
        self.chosen = tokens
        """[S] int32, on the device unless they were written to the host at once."""
        self.scores = scores
        """Of the chosen tokens, for the lines whose rows ask for them."""
        self._tokens = to_host(tokens)

    def tokens(self) -> Ints:
        """[S]; NOT_FINITE where no token can be chosen."""
        found: Ints = self._tokens.numpy()
        return found


class Sampler:
    """Serves the rows of one worker."""

    def __init__(self, ops: SampleOps, rows: Rows, capturable: bool = False) -> None:
        """`capturable`: a CUDA graph can hold `ops.choose`."""
        self._ops = ops
        self._capturable = capturable
        self._rows = rows
        self._staging = Staging(torch.int32, rows.device)
        self._staging.reserve(3 * len(rows.tokens))
        self._bits = Staging(torch.int32, rows.device)
        self._outbox = Outbox(len(rows.tokens), torch.int32) if rows.device.type == "cuda" else None

    def plain(self, rows: Ints) -> bool:
        """Whether `choose` is all that these rows need."""
        return not int(np.bitwise_or.reduce(self._rows.parameters.features[rows], initial=0)) & _MORE

    def choose(self, logits: torch.Tensor, row: torch.Tensor, position: torch.Tensor,
               threshold: torch.Tensor | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """Tokens [S] int32, on the device if not in `out`, written to their rows as well; for rows that are plain, or as the
        last of `launch`.

        It can be captured in a graph: the addresses that it reads and writes are the arguments' and the rows'.
        """
        return self._ops.choose(logits, self._rows.parameters.table, self._rows.tokens, row, position, threshold, out)

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold `choose_at`."""
        return self._capturable and self._outbox is not None

    def room(self, count: int) -> torch.Tensor:
        """Where `count` tokens of a replayed `choose_at` will be; its offset in memory is what `shift` must then hold."""
        assert self._outbox is not None
        return self._outbox.take(count)

    def choose_at(self, shift: torch.Tensor, logits: torch.Tensor, row: torch.Tensor, position: torch.Tensor) -> None:
        """`choose` for rows that are plain, to the place of the host's memory that `shift` [1] int32 tells the device. For
        capturing: each replay may have another place."""
        assert self._outbox is not None
        self._ops.choose(logits, self._rows.parameters.table, self._rows.tokens, row, position, None, self._outbox.memory,
                         shift)

    def launch(self, logits: torch.Tensor, lines: Lines, masks: LineMasks | None = None, stay: bool = False) -> Sampled:
        """Chooses tokens given logits [S, V] float32, which are changed in place, and writes them to their rows. `stay`: the
        chosen tokens are wanted on the device, too."""
        features = self._rows.parameters.features[lines.rows]
        every = int(np.bitwise_or.reduce(features, initial=0))
        out = None
        if self._outbox is not None and not stay and not every & int(Feature.LOGPROBS):
            out = self._outbox.take(len(lines.rows))
        if masks is None and not every & _MORE:
            return Sampled(self.choose(logits, lines.row, lines.position, None, out), None)
        picks = [np.flatnonzero(features & which) for which in (_EDITED, int(Feature.PENALTY), int(Feature.LOGPROBS))]
        edited, penalized, asking = self._bring(picks)
        rows, parameters = self._rows, self._rows.parameters
        own: tuple[torch.Tensor, torch.Tensor | None] = logits, asking
        if len(asking) and (masks is not None or (features[picks[2]] & _CHANGED).any()):
            own = logits[asking.long()], None
        if masks is not None:
            self._mask(logits, masks)
        if len(edited):
            self._ops.edit(logits, parameters.table, parameters.lists, rows.tokens, lines.row, lines.position, edited)
        if len(penalized):
            self._ops.penalize(logits, parameters.table, rows.tokens, lines.row, lines.position, penalized)
        threshold = self._ops.threshold(logits, parameters.table, lines.row) if every & int(Feature.FILTER) else None
        tokens = self.choose(logits, lines.row, lines.position, threshold, out)
        if not len(asking):
            return Sampled(tokens, None)
        top = max(map(parameters.logprobs, lines.rows[picks[2]].tolist()))
        found = self._ops.score(own[0], tokens[asking.long()], top, own[1])
        return Sampled(tokens, Scores([(lines.segments[picks[2]], lines.positions[picks[2]], found)]))

    def _mask(self, logits: torch.Tensor, masks: LineMasks) -> None:
        count, words = masks.bits.shape
        size = count * (words + 1)
        host = self._bits.host(size)
        host[:count * words], host[count * words:size] = masks.bits.ravel(), masks.lines
        self._bits.send(size)
        there = self._bits.device(size)
        self._ops.mask(logits, there[:count * words].view(count, words), there[count * words:])

    def _bring(self, lists: list[npt.NDArray[np.int64]]) -> tuple[torch.Tensor, ...]:
        """Lists of lines on the device, int32, in one upload."""
        size = sum(map(len, lists))
        self._staging.host(size)[:size] = np.concatenate(lists)
        self._staging.send(size)
        parts: tuple[torch.Tensor, ...] = self._staging.device(size).split([len(found) for found in lists])
        return parts
