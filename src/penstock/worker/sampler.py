"""Chooses tokens from logits: decides which of the operations in `ops/sample.py` a step needs, and launches them; log
probabilities of sampled tokens and of prompts, and their copies to the host.

A row's choice depends on its own logits, parameters, seed and position alone.

Order, as in vLLM: masks, edits (allowed tokens, bias, bad words, minimum length), penalties, temperature, min_p, top_k, top_p,
draw. Reported log probabilities are of the model's own logits.

Nothing here synchronises the device: copies to the host are enqueued when `launch` returns.

Where ranks each have a share of the vocabulary, `border` finds the threshold of filters without gathering logits: a number of
32 bits that sorts like its logit, eight bits at a time. Each rank adds up the weight of its tokens by their next eight bits,
the ranks exchange these 256 sums, and go on below the same bits. Sums are float64."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.plan import Ints, Logprobs, StepPlan, Want
from penstock.layers.decoder import Decoder
from penstock.ops.sample import SampleOps
from penstock.ops.sample_table import Column, Feature
from penstock.parallel.group import Group
from penstock.worker.rows import Outbox, Rows, Staging, to_host

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

    def __init__(self, tokens: torch.Tensor, scores: "Scores | None", probabilities: torch.Tensor | None = None) -> None:
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
        top = max(parameters.params[row].logprobs or 0 for row in lines.rows[picks[2]].tolist())
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
        parts: tuple[torch.Tensor, ...] = self._staging.carry(lists).split([len(found) for found in lists])
        return parts


_LINES, _SCORES = 128, 1 << 20
"""Logits rows computed, and log probabilities reported, at a time. Bounds the memory of scoring long prompts."""

Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The result of `SampleOps.score`: ids, log probabilities, ranks."""


class Scores:
    """Log probabilities of a step. Call `logprobs` after the device has computed them."""

    def __init__(self, parts: Iterable[tuple[npt.NDArray[np.integer], npt.NDArray[np.integer], Found]]) -> None:
        """parts: (segments [L], positions [L], result of `SampleOps.score`)."""
        self.parts = [(segments.astype(np.int32), positions.astype(np.int32), tuple(map(to_host, found)))
                       for segments, positions, found in parts]

    def logprobs(self, *others: "Scores") -> Logprobs | None:
        """Concatenates all parts and those of `others`. Entries with fewer alternatives are padded at the end with token -1."""
        parts = [part for scores in (self, *others) for part in scores.parts]
        if not parts:
            return None
        segments, positions, found = zip(*parts, strict=True)
        ids, values, ranks = zip(*found, strict=True)
        return Logprobs(np.concatenate(segments), np.concatenate(positions), _stack(ids, -1).astype(np.int32, copy=False),
                        _stack(values, 0.0).astype(np.float32, copy=False), _stack(ranks, 0).astype(np.int32, copy=False))


def _stack(blocks: tuple[torch.Tensor, ...], padding: float) -> npt.NDArray[Any]:
    if len(blocks) == 1:
        return np.asarray(blocks[0])
    width = max(block.shape[1] for block in blocks)
    return np.concatenate([np.pad(block.numpy(), ((0, 0), (0, width - block.shape[1])), constant_values=padding)
                           for block in blocks])


HeadOf = Callable[[torch.Tensor, npt.NDArray[np.integer]], torch.Tensor]
"""(hidden states, segments of all or of the first of them) -> their logits."""


def prompts(model: Decoder, head: HeadOf, hidden: torch.Tensor, plan: StepPlan, rows: Rows,
            size: Callable[[int], int]) -> Scores:
    """Scores known prompt tokens behind positions of segments with Want.SCORE; `size`: logits rows -> GEMM bucket."""
    scoring = np.flatnonzero(plan.wants & int(Want.SCORE)).tolist()
    parts: list[tuple[Ints, Ints, Found]] = []
    query_start = np.cumsum(plan.counts) - plan.counts
    for segment in scoring:
        row, start = int(plan.rows[segment]), int(plan.starts[segment])
        end = min(start + int(plan.counts[segment]), rows.parameters.prompt_len(row) - 1)
        top = rows.parameters.params[row].prompt_logprobs or 0
        lines = max(1, min(_LINES, _SCORES // (1 + top)))
        for first in range(start, end, lines):
            last = min(end, first + lines)
            at = int(query_start[segment]) + first - start
            states = hidden[at:at + size(last - first)]
            logits = model.whole(head(states, np.full(last - first, segment))[:last - first])
            found = model.kernels.sample.score(logits, rows.tokens[row, first + 1:last + 1], top)
            parts.append((np.full(last - first, segment, np.int32), np.arange(first + 1, last + 1, dtype=np.int32), found))
    return Scores(parts)


def border(logits: torch.Tensor, table: torch.Tensor, row: torch.Tensor, group: Group) -> torch.Tensor:
    """As `SampleOps.threshold`, of shares [S, V / ranks] of the logits."""
    mine = table[row.long()]
    real = mine.view(torch.float32)
    x = logits.float() * real[:, Column.INVERSE_TEMPERATURE, None]
    peak = group.gather(x.amax(-1)).amax(0)
    top_k, top_p = mine[:, Column.TOP_K].double(), real[:, Column.TOP_P].double()
    ones = torch.ones_like(x, dtype=torch.float64)
    kth = _search(x, ones, torch.where(top_k > 0, top_k, torch.inf), group)
    floor = torch.maximum(peak + real[:, Column.LOG_MIN_P], kth)
    weight = (x - peak[:, None]).exp().double().masked_fill_(x < floor[:, None], 0)
    total = group.gather(weight.sum(-1)).sum(0)
    found = torch.where(top_p < 1, torch.maximum(floor, _search(x, weight, top_p * total, group)), floor)
    return found.masked_fill((mine[:, Column.FEATURES] & int(Feature.FILTER)) == 0, -torch.inf)


def _search(x: torch.Tensor, weight: torch.Tensor, wanted: torch.Tensor, group: Group) -> torch.Tensor:
    """[S] the lowest value whose larger ones have less than the `wanted` weight [S], over all ranks; -inf: any has."""
    bits = x.view(torch.int32).long()
    key = torch.where(bits < 0, ~bits, bits | 1 << 31) & 0xFFFFFFFF
    found, above = torch.zeros_like(key[:, 0]), torch.zeros_like(wanted)
    for shift in (24, 16, 8, 0):
        inside = key >> (shift + 8) == found[:, None]
        sums = torch.zeros(len(x), 256, dtype=torch.float64, device=x.device)
        sums.scatter_add_(1, key >> shift & 255, torch.where(inside, weight, 0.0))
        # In the order of the ranks, so that all go the same way.
        sums = group.gather(sums).sum(0)
        larger = above[:, None] + sums.flip(1).cumsum(1).flip(1) - sums
        place = (larger < wanted[:, None]).int().argmax(1)
        found, above = found << 8 | place, larger.gather(1, place[:, None])[:, 0]
    number = torch.where(found >= 1 << 31, found & 0x7FFFFFFF, ~found).int().view(torch.float32)
    return torch.where(found == 0, -torch.inf, number)
