"""Sums over ranks of a prompt's rows, run by run: while the sums of one run travel, the next run is computed.

Of two ranks each has all sums, and norms them. Of more, each has the sums of its share of every run, adds them to its share of
the stream, norms them, and the ranks gather what is normed (Korthikanti et al. 2022, "sequence parallelism")."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from penstock.parallel.group import Group

AddNorm = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(norm(x + residual), x + residual) of rows; the second may be `residual`, overwritten."""


class Runs:
    """The runs of one step's rows, and the sums under way of the parts that a branch has left."""

    def __init__(self, ranks: Group, tokens: int, count: int) -> None:
        """`tokens` rows in `count` runs."""
        self._ranks = ranks
        self.shares = ranks.size > 2 and tokens % ranks.size == 0
        unit = ranks.size if self.shares else 1
        each = -(-tokens // (count * unit)) * unit
        self.borders: Sequence[tuple[int, int]] = [(at, min(tokens, at + each)) for at in range(0, tokens, each)]
        self._sums: list[Callable[[], torch.Tensor]] = []
        self._sign: torch.Tensor | None = None
        self._apart = False
        """Whether the stream's rows are up to date in each rank's shares alone."""

    def leave(self, compute: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Computes this rank's parts of each run [rows, W], and begins their sums. Returns a tensor that stands for them."""
        self._sums = []
        for number in range(len(self.borders)):
            self._sign = compute(number)
            self._sums.append(self._ranks.begin(self._sign, self.shares))
        assert self._sign is not None
        return self._sign

    def holds(self, x: torch.Tensor | None) -> bool:
        """Whether `x` stands for sums under way."""
        return x is not None and x is self._sign

    def enter(self, residual: torch.Tensor, norm: AddNorm) -> list[Callable[[], torch.Tensor]]:
        """The rows of each run, normed with the sums added to the stream `residual` [T, W], which changes. A call waits."""
        self._sign = None
        if not self.shares:
            return [partial(self._normed, total, residual[first:last], norm)
                    for total, (first, last) in zip(self._sums, self.borders, strict=True)]
        self._apart = True
        return [self._ranks.begin_gather(self._normed(total, own, norm))
                for total, own in zip(self._sums, self._owned(residual), strict=True)]

    def whole(self, residual: torch.Tensor) -> torch.Tensor:
        """The stream with the rows of all ranks."""
        if not self._apart:
            return residual
        self._apart = False
        return torch.cat([self._ranks.gather(own.contiguous()).flatten(0, 1) for own in self._owned(residual)])

    def _owned(self, x: torch.Tensor) -> list[torch.Tensor]:
        """This rank's shares of each run of rows."""
        return [x[first:last].chunk(self._ranks.size)[self._ranks.rank] for first, last in self.borders]

    @staticmethod
    def _normed(total: Callable[[], torch.Tensor], residual: torch.Tensor, norm: AddNorm) -> torch.Tensor:
        normed, stream = norm(total(), residual)
        if stream.data_ptr() != residual.data_ptr():
            residual.copy_(stream)
        return normed
