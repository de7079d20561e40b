"""Tokens on their way to the experts of other ranks and back, where ranks have tokens of their own: attention by data.

All tokens go to all ranks in one message of a size that all know, so that CUDA graphs can hold it. Where long messages are to
overlap, prompts are two batches: while one travels, the experts compute the other. If picks leave out enough ranks, each token
then goes once to each rank that has one of its experts; the numbers are agreed first, which waits for the device."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from penstock.ops.payload import Payload
from penstock.parallel.lockstep import Lockstep

_REACHED = 0.8
"""The largest share of ranks that a token's picks reach, with which each token goes to those alone."""

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""The summed results [T, W] of this rank's experts for tokens, places in its stacks (-1: elsewhere) and weights [T, K]."""


class Tokens(NamedTuple):
    """One rank's, with their picks."""

    x: torch.Tensor
    """[T, W]"""
    owners: torch.Tensor
    """[T, K] int32: the rank that has each pick's expert; -1: there is no pick."""
    places: torch.Tensor
    """[T, K] int32: where in that rank's stacks."""
    weights: torch.Tensor
    """[T, K] float32."""

    def part(self, number: int, parts: int) -> "Tokens":
        return Tokens(*(one.tensor_split(parts)[number] for one in self))


def together(data: Lockstep, tokens: Tokens, payload: Payload, runs: int, compute: Compute) -> torch.Tensor:
    """The experts' results [T, W] for this rank's tokens. All ranks call it, those without tokens too. `runs`: in which so many
    tokens as the largest rank sends are exchanged, as `ops/messages.py` says."""
    ranks, picks = data.group.size, tokens.owners.shape[1]
    parts = 1 if data.decodes else min(2, runs)
    batches: Sequence[_Picked | _Everywhere]
    reached = 1 - (1 - 1 / ranks) ** picks
    if parts > 1 and reached < _REACHED:
        batches = [_Picked(data, tokens.part(number, parts), payload) for number in range(parts)]
    else:
        room = -(-data.share // parts)
        batches = [_Everywhere(data, tokens.part(number, parts), payload, room, parts > 1) for number in range(parts)]
    for batch in batches:
        batch.compute(compute)
    return torch.cat([batch.result() for batch in batches]) if parts > 1 else batches[0].result()


class _Everywhere:
    """A batch that goes to all ranks, filled up to `room` tokens. `later`: messages travel while other things are computed."""

    def __init__(self, data: Lockstep, tokens: Tokens, payload: Payload, room: int, later: bool) -> None:
        self._group, self._tokens, self._payload, self._room, self._later = data.group, tokens, payload, room, later
        packed = payload.pack(tokens.x)
        self._sizes = [packed.shape[1], *[tokens.owners.shape[1]] * 3]
        sent = packed.new_zeros(room, sum(self._sizes))
        sent[:len(packed)] = torch.cat((packed, tokens.owners, tokens.places, tokens.weights.view(torch.int32)), 1)
        sent[len(packed):, self._sizes[0]:self._sizes[0] + self._sizes[1]] = -1
        if later:
            self._arrived = self._group.begin_gather(sent)
        else:
            found = self._group.gather(sent).flatten(0, 1)
            self._arrived = lambda: found

    def compute(self, compute: Compute) -> None:
        words, owners, places, weights = self._arrived().split(self._sizes, 1)
        own = torch.where(owners == self._group.rank, places, -1)
        out = compute(self._payload.unpack(words, self._tokens.x.dtype), own, weights.contiguous().view(torch.float32))
        if self._later:
            self._back = self._group.begin(out, True)
        else:
            total = self._group.reduce_own(out.view(self._group.size, self._room, -1))
            self._back = lambda: total

    def result(self) -> torch.Tensor:
        return self._back()[:len(self._tokens.x)]


class _Picked:
    """A batch whose tokens go to the ranks of their experts alone."""

    def __init__(self, data: Lockstep, tokens: Tokens, payload: Payload) -> None:
        self._group, self._tokens, self._payload = data.group, tokens, payload
        ranks = torch.arange(data.group.size, device=tokens.x.device)
        theirs = tokens.owners == ranks[:, None, None]
        reached = theirs.any(-1)
        counts = self._group.gather(reached.sum(1)).tolist()
        self._sent, self._received = counts[data.group.rank], [line[data.group.rank] for line in counts]
        to, self._rows = reached.nonzero().unbind(1)
        places = torch.where(theirs[to, self._rows], tokens.places[self._rows], -1)
        packed = payload.pack(tokens.x)
        self._sizes = [packed.shape[1], *[places.shape[1]] * 2]
        lines = torch.cat((packed[self._rows], places, tokens.weights[self._rows].view(torch.int32)), 1)
        self._arrived = self._group.begin_exchange(lines, self._sent, self._received)

    def compute(self, compute: Compute) -> None:
        words, places, weights = self._arrived().split(self._sizes, 1)
        out = compute(self._payload.unpack(words, self._tokens.x.dtype), places.contiguous(),
                      weights.contiguous().view(torch.float32))
        self._back = self._group.begin_exchange(out, self._received, self._sent)

    def result(self) -> torch.Tensor:
        """Sums are in the order of the ranks, each of which has a token once, and rounded once."""
        total = torch.zeros_like(self._tokens.x, dtype=torch.float32)
        for rows, part in zip(self._rows.split(self._sent), self._back().split(self._sent), strict=True):
            total.index_add_(0, rows, part.float())
        return total.to(self._tokens.x.dtype)
