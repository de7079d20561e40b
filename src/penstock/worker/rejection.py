"""Rejection sampling of drafts: keeps the distributions that drafts were drawn from, and verifies drafts by them.

Tokens come from exactly the target's distribution, but an answer also depends on how many tokens each step drafted. Drafts are
drawn by noise of their own, keyed by (seed, number of known tokens, place), so that no two rounds share noise. `token` accepts
one draft after the other (Leviathan et al. 2023), `block` by the joint probability of the prefix (Sun et al. 2024), which
never keeps fewer on average. Greedy rows, and rows that report log probabilities, are verified strictly (`verify.py`)."""

import numpy as np
import torch

from penstock.ops import noise
from penstock.ops.sample_table import Column, Feature
from penstock.worker.drafting import Drafting
from penstock.worker.rows import Rows, upload
from penstock.worker.sampler import LogitsRows, Sampled

_DRAW, _ACCEPT, _REST = 0x1234567, 0x2345671, 0x3456712
"""Salts of the noise that draws drafts, accepts them, and draws the token behind them."""


def scratch(method: str, rows: int, tokens: int, vocab: int) -> int:
    """Bytes of the distributions of a step's drafts, at most."""
    return 4 * rows * tokens * vocab if method else 0


class Rejection:
    """The drafts' distributions in the step that is being made."""

    def __init__(self, rows: Rows, method: str, vocab: int) -> None:
        """`method`: token or block."""
        self._rows = rows
        self.block = method == "block"
        self._vocab = vocab
        count = len(rows.tokens)
        self._segment = torch.zeros(count, dtype=torch.int64, device=rows.device)
        """[row] its line in `_drawn`."""
        self._first = torch.full((count,), -1, dtype=torch.int32, device=rows.device)
        """[row] the position of its first draft; -1 if a drafter's choice has no distribution."""
        self._drawn = torch.empty(0, device=rows.device)
        """[segments, places, vocabulary] the distributions; the last line is the padding's."""
        self._shape = (0, 0)

    def begin(self, drafting: Drafting) -> None:
        """Forgets the step before."""
        self._first.fill_(-1)
        self._drawn, self._shape = self._drawn[:0], (len(drafting.segments), int(drafting.count.max(initial=0)))
        if self._shape[0]:
            self._segment[drafting.row.long()] = torch.arange(self._shape[0], device=self._rows.device)
            self._begun = drafting.row.long(), drafting.length

    def draw(self, logits: torch.Tensor, row: torch.Tensor, position: torch.Tensor) -> None:
        """Draws drafts [S] from logits [S, V'] for these positions of rows, and writes them over those of greedy rows' rule."""
        if not len(self._drawn):
            self._drawn = torch.zeros(self._shape[0] + 1, self._shape[1], self._vocab, device=logits.device)
            self._first[self._begun[0]] = self._begun[1]
        at, real = row.long(), row >= 0
        mine, first = self._rows.parameters.table[at], self._first[at]
        scaled = logits.float() * mine.view(torch.float32)[:, Column.INVERSE_TEMPERATURE, None]
        key = noise.keys(noise.keys(mine[:, Column.SEED_KEY] ^ _DRAW, first), position)
        token = (scaled - _exponential(key, scaled.shape[1]).log_()).argmax(1).int()
        random = real & ((mine[:, Column.FEATURES] & int(Feature.RANDOM)) > 0)
        # Padding writes what is there: no row's first token is a draft.
        place = torch.where(real, position, 0).long()
        self._rows.tokens[at, place] = torch.where(random, token, self._rows.tokens[at, place])
        segment, offset = torch.where(real, self._segment[at], -1), torch.where(real, position - first, 0)
        self._drawn[segment, offset.long(), :scaled.shape[1]] = scaled.softmax(1)

    def of(self, lines: LogitsRows, drafts: torch.Tensor) -> torch.Tensor:
        """[L, vocabulary] the distributions that drafts at these lines were drawn from; certainty where they were not drawn."""
        sure = torch.zeros(len(drafts), self._vocab, device=drafts.device).scatter_(1, drafts.long().clamp(min=0)[:, None], 1.0)
        if not len(self._drawn):
            return sure
        row, first = lines.row.long(), self._first[lines.row.long()]
        place = (lines.position - first).long()
        known = (first >= 0) & (place >= 0) & (place < self._drawn.shape[1])
        place = place.clamp(0, self._drawn.shape[1] - 1)
        # Rows that this step does not draft for have the lines of earlier steps.
        return torch.where(known[:, None], self._drawn[torch.where(known, self._segment[row], 0), place], sure)


class Judging:
    """The verification of one step: `take` is called for its logits rows in order, then `settle`."""

    def __init__(self, rejection: Rejection, rows: Rows, lines: LogitsRows, drafts: torch.Tensor) -> None:
        self._rejection, self._rows, self._lines, self._drafts = rejection, rows, lines, drafts
        count, segments = len(lines.rows), lines.segments
        self._begins, sizes = lines.groups()
        self._group = np.repeat(np.arange(len(sizes)), sizes)
        self._offset = np.arange(count) - np.repeat(self._begins, sizes)
        self._last = np.append(segments[1:] != segments[:-1], True)[:count]
        features = rows.parameters.features[lines.rows]
        drawn = (features & int(Feature.RANDOM) > 0) & (features & int(Feature.LOGPROBS) == 0)
        self._ruled = drawn & (np.repeat(sizes, sizes) > 1)
        """[L] whether the line is verified by rejection."""
        self.needed = bool(self._ruled.any())
        # Of each line: the joint ratio before it, that of its draft alone, the mass that is left, and the token drawn from it.
        self._joint, self._ratio, self._mass = (torch.ones(count, device=drafts.device) for _ in range(3))
        self._rest = torch.zeros(count, dtype=torch.int32, device=drafts.device)
        self._at = 0

    def take(self, part: LogitsRows, target: torch.Tensor) -> None:
        """Takes the target's distributions [P, V] of the next lines."""
        at, end, device = self._at, self._at + len(part.rows), target.device
        self._at = end
        drafts, offset = self._drafts[at:end], self._offset[at:end]
        last = upload(self._last[at:end].astype(np.int32), device)[:, None] > 0
        # A line without a number has no mass; the next step meets it again.
        target = torch.nan_to_num(target)
        source = self._rejection.of(part, drafts)[:, :target.shape[1]].masked_fill(last, 0.0)
        picked = drafts.long().clamp(min=0)[:, None]
        self._ratio[at:end] = (target.gather(1, picked) / source.gather(1, picked).clamp(min=1e-37))[:, 0].clamp(max=1e30)
        if self._rejection.block:
            for place in range(1, int(offset.max(initial=0)) + 1):
                here = upload((at + np.flatnonzero(offset == place)).astype(np.int32), device).long()
                self._joint[here] = (self._joint[here - 1] * self._ratio[here - 1]).clamp(max=1.0)
        left = (self._joint[at:end, None] * target - source).clamp(min=0.0)
        self._mass[at:end] = left.sum(1)
        left = torch.where(last, target, left)
        key = self._key(_REST, at, end)
        self._rest[at:end] = (left.log() - _exponential(key, left.shape[1]).log_()).argmax(1).int()

    def settle(self, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(drafts, tokens) [L] for `Verifier.verify`, given the tokens chosen strictly. They are written to their rows."""
        device, count = chosen.device, len(chosen)
        pairs = upload(np.stack((self._ruled, self._last, self._group, self._offset)).astype(np.int32), device)
        ruled, last, group, offset = pairs[0] > 0, pairs[1] > 0, pairs[2].long(), pairs[3]
        uniform = torch.exp(-_exponential(self._key(_ACCEPT, 0, count), 1)[:, 0])
        kept = torch.zeros(len(self._begins), dtype=torch.int32, device=device)
        if self._rejection.block:
            chance = self._mass / (self._mass + 1.0 - self._joint).clamp(min=1e-37)
            accepted = uniform <= torch.where(last, self._joint, chance)
            kept.scatter_reduce_(0, group, torch.where(accepted, offset, 0), "amax")
        else:
            wrong = torch.where((uniform > self._ratio) | last, offset, count)
            kept.fill_(count).scatter_reduce_(0, group, wrong, "amin")
        right = offset < kept[group]
        found = torch.where(ruled, torch.where(right, self._drafts, torch.where(chosen < 0, chosen, self._rest)), chosen)
        self._rows.tokens[self._lines.row.long(), self._lines.position.long()] = found.clamp(min=0)
        return torch.where(ruled & ~right, -1, self._drafts), found

    def _key(self, salt: int, at: int, end: int) -> torch.Tensor:
        begin = upload(self._begins[self._group[at:end]].astype(np.int32), self._drafts.device).long()
        keys = self._rows.parameters.table[self._lines.row[at:end].long(), Column.SEED_KEY] ^ salt
        return noise.keys(noise.keys(keys, self._lines.position[begin]), self._lines.position[at:end])


def _exponential(key: torch.Tensor, width: int) -> torch.Tensor:
    return noise.exponential(key[:, None], torch.arange(width, dtype=torch.int32, device=key.device)[None])


def settled(sampled: list[Sampled], tokens: torch.Tensor) -> None:
    """Replaces the tokens that were chosen strictly."""
    for one, own in zip(sampled, tokens.split([len(one.chosen) for one in sampled]), strict=True):
        one.settle(own)
