"""Chooses tokens from logits: decides which of the operations in `ops/sample.py` a step needs, and launches them.

A row's choice depends on its own logits, parameters, seed and position alone.

Order, as in vLLM: masks, edits (allowed tokens, bias, bad words, minimum length), penalties, temperature, min_p, top_k, top_p,
draw.
Reported log probabilities are those of the model's own logits, before all of that.

Nothing here synchronises the device: copies to the host are enqueued when `launch` returns."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.plan import Ints
from penstock.layers.decoder import Decoder
from penstock.ops.sample import SampleOps
from penstock.ops.sample_table import Feature
from penstock.worker.borders import border
from penstock.worker.rows import Rows
from penstock.worker.scoring import Scores
from penstock.worker.staging import Outbox, Staging, to_host

_EDITED = int(Feature.EDIT | Feature.ALLOWED)
_CHANGED = _EDITED | int(Feature.PENALTY)
_MORE = ~int(Feature.RANDOM)
_BEYOND = ~int(Feature.RANDOM | Feature.FILTER)
_BEST = 128
"""Logits of each rank that are exchanged for filters: what top_k may be at most."""


@dataclass(slots=True)
class LogitsRows:
    """The segments, rows and positions of a step's S logits rows, on the host and on the device."""

    segments: npt.NDArray[np.int64]
    """[S] indices of the plan's segments."""
    rows: Ints
    positions: Ints
    """[S] positions of the sampled tokens."""
    row: torch.Tensor
    """[S] int32."""
    position: torch.Tensor
    """[S] int32."""

    def groups(self) -> tuple[Ints, Ints]:
        """The first line of each segment, and the number of its lines."""
        first = np.flatnonzero(np.diff(self.segments, prepend=-1)).astype(np.int32)
        return first, np.diff(first, append=np.int32(len(self.segments)))

    def parts(self, most: int) -> "Iterator[LogitsRows]":
        """Yields the logits rows in order, at most `most` at a time."""
        for at in range(0, len(self.rows), most):
            part = slice(at, at + most)
            yield LogitsRows(self.segments[part], self.rows[part], self.positions[part], self.row[part], self.position[part])


class RowMasks(NamedTuple):
    """Token masks of some of a step's logits rows."""

    bits: Ints
    """[L, words], as in core/plan.py::Masks."""
    lines: npt.NDArray[np.int64]
    """[L] indices of the logits rows."""


MAX_LOGITS_ROWS = 256
"""Maximum logits rows per sampling pass. Bounds the memory of the logits, which are as wide as the vocabulary."""


class Sampled:
    """Sampled tokens. The host may read them once the device has run the work of `Sampler.launch`."""

    def __init__(self, tokens: torch.Tensor, scores: Scores | None, probabilities: torch.Tensor | None = None) -> None:
        self.chosen = tokens
        """[S] int32, on the device unless the kernel wrote them to host memory directly."""
        self.scores = scores
        """Log probabilities of the tokens whose rows ask for them."""
        self.probabilities = probabilities
        """[S, V] float32, on the device, if they were asked for: the distributions that the tokens were drawn from."""
        self._tokens = to_host(tokens)

    def settle(self, tokens: torch.Tensor) -> None:
        """Replaces the tokens by others [S]."""
        self.chosen, self._tokens, self.probabilities = tokens, to_host(tokens), None

    def tokens(self) -> Ints:
        """[S]; NOT_FINITE where no token can be chosen."""
        found: Ints = self._tokens.numpy()
        return found


class Sampler:
    """Serves the rows of one worker."""

    def __init__(self, ops: SampleOps, rows: Rows, capturable: bool = False, model: Decoder | None = None) -> None:
        """`capturable`: a CUDA graph can hold `ops.choose`. `model`: knows its share of the vocabulary; None: all."""
        self._ops = ops
        self._model = model if model is not None and model.group is not None else None
        self._capturable = capturable
        self._rows = rows
        self._staging = Staging(rows.device, rows.bring)
        self._staging.reserve(3 * len(rows.tokens))
        self._bits = Staging(rows.device, rows.bring)
        self._room = Staging(rows.device, rows.bring)
        self._given: Ints | None = None
        """The host buffer of `_room` that `mask_room` gave away last."""
        self._outbox = Outbox(len(rows.tokens), torch.int32) if rows.device.type == "cuda" else None

    def plain(self, rows: Ints) -> bool:
        """Whether these rows need no operation besides `choose`."""
        return not int(np.bitwise_or.reduce(self._rows.parameters.features[rows], initial=0)) & _MORE

    def choose(self, logits: torch.Tensor, row: torch.Tensor, position: torch.Tensor,
               threshold: torch.Tensor | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """Samples tokens [S] int32, to `out` if given and to their rows. For plain rows, or as the last step of `launch`.

        Capturable in a CUDA graph: it uses only the addresses of its arguments and of the row tables."""
        return self._ops.choose(logits, self._rows.parameters.table, self._rows.tokens, row, position, threshold, out)

    def _choose(self, logits: torch.Tensor, row: torch.Tensor, position: torch.Tensor, threshold: torch.Tensor | None,
                out: torch.Tensor | None, shift: torch.Tensor | None) -> torch.Tensor:
        """Ranks that have shares of the logits exchange the best token of each part of them, never logits."""
        ops, table, tokens = self._ops, self._rows.parameters.table, self._rows.tokens
        group = None if self._model is None else self._model.group
        if group is None:
            return ops.choose(logits, table, tokens, row, position, threshold, out, shift)
        values, places = ops.candidates(logits, table, row, position, threshold, group.rank * logits.shape[1])
        both = group.gather(torch.stack((values.view(torch.int32), places)))
        both = both.permute(1, 2, 0, 3).reshape(2, len(values), -1)
        return ops.elect(both[0].view(torch.float32), both[1], tokens, row, position, out, shift)

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold `choose_at`."""
        return self._capturable and self._outbox is not None

    def room(self, count: int) -> torch.Tensor:
        """Reserves host memory for `count` tokens of a replayed `choose_at`; `shift` must hold its storage offset."""
        assert self._outbox is not None
        return self._outbox.take(count)

    def choose_at(self, shift: torch.Tensor, logits: torch.Tensor, row: torch.Tensor, position: torch.Tensor) -> None:
        """Runs `choose` for plain rows and writes to host memory at the offset in `shift` [1] int32: one for each replay."""
        assert self._outbox is not None
        self._choose(logits, row, position, None, self._outbox.memory, shift)

    def launch(self, logits: torch.Tensor, lines: LogitsRows, masks: RowMasks | None = None, stay: bool = False,
               whole: bool = False) -> Sampled:
        """Samples tokens from logits [S, V] float32, which are modified in place, and writes them to their rows. `stay`: keep
        the sampled tokens on the device as well. `whole`: return the distributions, too."""
        features = self._rows.parameters.features[lines.rows]
        every = int(np.bitwise_or.reduce(features, initial=0))
        out = None
        if self._outbox is not None and not stay and not every & int(Feature.LOGPROBS):
            out = self._outbox.take(len(lines.rows))
        if masks is None and not every & _MORE and not whole:
            return Sampled(self._choose(logits, lines.row, lines.position, None, out, None), None)
        if self._model is not None:
            group = self._model.group
            if group is not None and masks is None and not whole and not every & _BEYOND:
                table = self._rows.parameters.table
                if self._rows.parameters.narrow(lines.rows, _BEST):
                    best = group.gather(logits.topk(min(_BEST, logits.shape[1])).values).transpose(0, 1).flatten(1)
                    least = self._ops.threshold(best.contiguous(), table, lines.row)
                else:
                    least = border(logits, table, lines.row, group)
                return Sampled(self._choose(logits, lines.row, lines.position, least, out, None), None)
            logits = self._model.whole(logits)
        picks = [np.flatnonzero(features & which) for which in (_EDITED, int(Feature.PENALTY), int(Feature.LOGPROBS))]
        rows, parameters = self._rows, self._rows.parameters
        edited, penalized, asking, named = self._bring([*picks, parameters.named(lines.rows[picks[2]]).ravel()])
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
        drawn = self._ops.probabilities(logits, parameters.table, lines.row, threshold) if whole else None
        if not len(asking):
            return Sampled(tokens, None, drawn)
        top = max(map(parameters.logprobs, lines.rows[picks[2]].tolist()))
        found = self._ops.score(own[0], tokens[asking.long()], top, own[1])
        if len(named):
            ids = named.view(len(asking), -1)
            for there, one in zip(found, self._ops.score(own[0], ids, 0, own[1]), strict=True):
                natural = there[:, 1:1 + ids.shape[1]]
                natural.copy_(torch.where(ids >= 0, one, natural))
        return Sampled(tokens, Scores([(lines.segments[picks[2]], lines.positions[picks[2]], found)]), drawn)

    def mask_room(self, lines: int, words: int) -> Ints:
        """Memory [lines, words] for the masks of the next step, from which the device can copy them."""
        self._given = None
        if lines > MAX_LOGITS_ROWS:
            return np.empty((lines, words), np.int32)
        size = lines * (words + 1)
        # Once and for all: this is called outside of the steps' stream, whose work must not lose the memory.
        self._room.reserve(MAX_LOGITS_ROWS * (words + 1))
        self._given = self._room.host(size)[:size]
        return self._given[:lines * words].reshape(lines, words)

    def _mask(self, logits: torch.Tensor, masks: RowMasks) -> None:
        count, words = masks.bits.shape
        size = count * (words + 1)
        host, self._given = self._given, None
        staging = self._room
        if host is None or len(host) != size or not np.may_share_memory(host, masks.bits):
            # These masks lie elsewhere, or are those of a part of the step's rows.
            staging = self._bits
            host = staging.host(size)
            host[:count * words] = masks.bits.ravel()
        host[count * words:size] = masks.lines
        staging.send(size)
        there = staging.device(size)
        self._ops.mask(logits, there[:count * words].view(count, words), there[count * words:])

    def _bring(self, lists: list[npt.NDArray[np.integer]]) -> tuple[torch.Tensor, ...]:
        """Uploads lists of row indices or token ids in one copy. Returns them as int32 device tensors."""
        size = sum(map(len, lists))
        if size:
            self._staging.host(size)[:size] = np.concatenate(lists)
            self._staging.send(size)
        parts: tuple[torch.Tensor, ...] = self._staging.device(size).split([len(found) for found in lists])
        return parts
