"""Engines that step together, because each has some of the experts for the tokens of all (attention by data).

A step is a round: all ranks first agree on its size, those without tokens too. While no rank has any, nobody agrees on
anything; the first that has some calls the others by a number in memory that all map."""

import mmap
import os
from collections.abc import Callable

import torch

from penstock.parallel.group import Group

_BYTES = 8
"""Of the wave's number."""


class Lockstep:
    """One rank's side. Rounds in a row, until one has no tokens at all, are a wave."""

    def __init__(self, group: Group, agreeing: Group, path: str, tensors: int = 1) -> None:
        """`group` exchanges tensors of the device, `agreeing` those of the host. `path`: of the file with the wave's number.
        `tensors`: ranks of each engine, which divide its layers and have equal steps."""
        self.group, self.tensors = group, tensors
        self._own = slice(first := agreeing.rank // tensors * tensors, first + tensors)
        self.awaits = False
        """Whether the round is agreed on with a plan or message of this engine that has not come to this rank yet, or is to be
        begun by this rank."""
        self.most = 0
        """The most tokens that any rank has in this round."""
        self.decodes = False
        """Whether this round's steps are replayed, as all ranks only decode."""
        self.each: Callable[[], None] | None = None
        """Called in every round that has tokens, by all ranks."""
        self._agreeing = agreeing
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(file, _BYTES)
        self._called = mmap.mmap(file, _BYTES)
        os.close(file)
        self._ended = 0

    @property
    def active(self) -> bool:
        """Whether a wave goes on, of which this rank has not seen the end."""
        return not self.awaits and int.from_bytes(self._called[:], "little") > self._ended

    @property
    def share(self) -> int:
        """The most tokens that any rank sends in this round."""
        return -(-self.most // self.tensors)

    def begin(self, tokens: int, decodes: bool) -> bool:
        """Begins a round of so many tokens here; sets `most`. Returns whether on all ranks the tokens are one of each segment,
        which is so with no tokens. Waits for the other ranks' hosts. Tokens of -1: none, but a message has come at which the
        ranks of this engine wait for each other."""
        if self.awaits:
            self.awaits = False
            return self.decodes
        if tokens:
            self._called[:] = (self._ended + 1).to_bytes(_BYTES, "little")
        sizes = self._agreeing.gather(torch.tensor([tokens, decodes], dtype=torch.int64))
        self.most = max(0, int(sizes[:, 0].max()))
        self.awaits = not tokens and bool(sizes[self._own, 0].any())
        if not self.most:
            self._ended += 1
        elif self.each is not None:
            self.each()
        self.decodes = bool(sizes[:, 1].all())
        return self.decodes
