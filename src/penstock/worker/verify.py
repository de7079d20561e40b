"""Verifies drafted tokens (speculative decoding): the only place where drafts are compared with sampled tokens.

At each position of a segment with drafts a token is sampled as if all drafts before it were right. Drafts are accepted up to
the first that differs from the sampled token, which is kept too. Sampling is a function of logits, parameters, seed and
position, so the kept tokens are exactly those of decoding one by one, unless a `Speculation` has another rule."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from penstock.config.speculation import Speculation
from penstock.core.plan import Enter, Ints, StepPlan, Want
from penstock.ops.sample_table import Feature
from penstock.worker.rows import Rows, to_host, upload
from penstock.worker.sampler import LogitsRows

_FAR = 2**31 - 1
_SERIES = 509
"""Series of imposed outcomes, picked by row and token: those of one, at some hundred positions, differ from the mean."""
STRICT = Speculation("")
"""The rule by which drafts are kept where no drafter says otherwise: they equal the sampled tokens."""


class Verifier:
    def __init__(self, rows: Rows, rule: Speculation = STRICT) -> None:
        self._rows = rows
        self.thinking = Thinking(rows, rule) if rule.relaxed else None
        """The rows whose drafts are accepted by the relaxed rule."""
        number, position = (torch.arange(count, device=rows.device) for count in (_SERIES, rows.tokens.shape[1]))
        self._kept = None if rule.synthetic is None else _chance(number[:, None], position) < rule.synthetic
        """[series, position] whether a draft is kept, where the acceptance is imposed."""

    def drafts(self, lines: LogitsRows) -> torch.Tensor:
        """Returns the tokens [L] now at the positions of the logits rows. Call before sampling overwrites them."""
        return self._rows.tokens[lines.row.long(), lines.position.long()]

    def verify(self, plan: StepPlan, lines: LogitsRows, drafts: torch.Tensor, chosen: torch.Tensor,
               walked: torch.Tensor | None = None) -> "Verified":
        """Compares drafts and sampled tokens [L] of all logits rows of a step, and updates the lengths of their rows.
        `walked`: the numbers of tokens that the segments keep, if `Trees.walk` has found them."""
        first, count = lines.groups()
        segment = np.repeat(np.arange(len(first), dtype=np.int32), count)
        place = np.arange(len(chosen), dtype=np.int32) - first[segment]
        # The token sampled after a segment's last position has no draft to compare with.
        values = np.concatenate((segment, place, place + 1 < count[segment], first), dtype=np.int32, casting="unsafe")
        group, offset, drafted, begin = upload(values, chosen.device).split([*[len(chosen)] * 3, len(first)])
        if self._kept is not None:
            drafts = torch.where(self._kept[(lines.row + chosen) % _SERIES, lines.position.long()], chosen, -1)
        right = (drafts == chosen) & (drafted > 0)
        kept = torch.full((len(first),), _FAR, dtype=torch.int32, device=chosen.device)
        kept.scatter_reduce_(0, group.long(), torch.where(right, _FAR, offset), "amin")
        kept = kept + 1 if walked is None else walked
        row, length = lines.row[begin.long()], lines.position[begin.long()] + kept
        self._rows.length[row.long()] = length
        if self.thinking is not None:
            self.thinking.follow(lines, chosen, offset < kept[group.long()])
        return Verified(plan, lines.segments[first], row, length, begin, kept)


def _chance(number: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Numbers from 0 to 1 that look random, of each (number, position)."""
    mixed = (position * 0x9E3779B1 + number * 0x85EBCA77) & 0xFFFFFFFF
    mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D & 0xFFFFFFFF
    return (mixed ^ (mixed >> 12)) / 2**32


class Thinking:
    """Relaxed acceptance: which rows think, and the drafts that they keep although another token was better.

    Lossy: while a model thinks, a draft is kept if it is among the best tokens and nearly as probable as the best. Rows that
    report log probabilities, and those whose thinking is not ended by one token, are verified strictly."""

    def __init__(self, rows: Rows, rule: Speculation) -> None:
        self._rows = rows
        self._rule = rule
        count = len(rows.tokens)
        self._ends = np.full((2, count), -1, np.int32)
        """[begin or end of thinking, row] tokens; -1: none."""
        self._tokens = torch.full((2, count), -1, dtype=torch.int32, device=rows.device)
        self._on = torch.zeros(count, dtype=torch.bool, device=rows.device)
        """[row] whether it thinks."""

    def enter(self, enters: Iterable[Enter]) -> None:
        for enter in enters:
            begin, end = enter.params.reasoning_start_ids or [], enter.params.reasoning_end_ids or []
            fits = len(end) == 1 and len(begin) < 2
            self._ends[:, enter.row] = [begin[0] if fits and begin else -1, end[0] if fits else -1]
            said = enter.tokens[enter.prompt_len:]
            on = fits and end[0] not in said and (not begin or begin[0] in said)
            self._tokens[:, enter.row] = upload(self._ends[:, enter.row].copy(), self._rows.device)
            self._on[enter.row] = on

    def relax(self, logits: torch.Tensor, lines: LogitsRows, drafts: torch.Tensor) -> None:
        """Raises the logits of drafts [L] that are good enough above all others, so that sampling chooses them."""
        features = self._rows.parameters.features[lines.rows]
        picked = (self._ends[1, lines.rows] >= 0) & (features & int(Feature.LOGPROBS) == 0)
        # The last line of a segment has no draft.
        picked &= np.append(lines.segments[1:] == lines.segments[:-1], False)
        if not picked.any():
            return
        at = upload(np.flatnonzero(picked).astype(np.int32), logits.device).long()
        draft, best = drafts[at].long()[:, None], logits[at].topk(self._rule.relaxed).values
        found = logits[at].gather(1, draft)
        near = (found >= best[:, -1:]) & (found >= best[:, :1] - self._rule.delta) & self._on[lines.row[at].long()][:, None]
        logits[at[:, None], draft] = torch.where(near, best[:, :1] + 1e4, found)

    def follow(self, lines: LogitsRows, chosen: torch.Tensor, kept: torch.Tensor | None = None) -> None:
        """Looks for the beginning and the end of thinking in chosen tokens [L], of which those in the mask [L] are kept."""
        if not (self._ends[1, lines.rows] >= 0).any():
            return
        row = lines.row.long()
        sure = torch.ones_like(chosen, dtype=torch.bool) if kept is None else kept
        for which, value in ((0, True), (1, False)):
            # Several lines may be of one row. Picking them by a mask would wait for the device.
            found = torch.zeros_like(self._on, dtype=torch.int32)
            found.index_add_(0, row, (sure & (chosen == self._tokens[which, row])).int())
            self._on.masked_fill_(found > 0, value)


class Verified:
    """Numbers of tokens that segments keep; the copy to the host is in flight."""

    def __init__(self, plan: StepPlan, segments: npt.NDArray[np.int64], row: torch.Tensor, length: torch.Tensor,
                 first: torch.Tensor, kept: torch.Tensor) -> None:
        self.segments = segments
        """[S] indices of the plan's segments."""
        self.row = row
        """[S] int32, on the device."""
        self.length = length
        """[S] int32, on the device: number of known tokens of each row."""
        self.first = first
        """[S] int32, on the device: each segment's first logits row."""
        self._each = (plan.wants & int(Want.EACH)) > 0
        self._starts = plan.starts
        self.count = kept
        """[S] int32, on the device: number of kept tokens."""
        self._kept = to_host(kept)

    def kept(self) -> Ints:
        """Returns the number of kept tokens of each of the plan's segments."""
        found = np.zeros(len(self._each), np.int32)
        found[self.segments] = self._kept.numpy()
        return found

    def holds(self, kept: Ints, segments: npt.NDArray[np.integer], positions: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Returns a mask of the entries (segment, position as in the plan) whose tokens are kept."""
        found: npt.NDArray[np.bool_] = ~self._each[segments] | (positions - self._starts[segments] <= kept[segments])
        return found
