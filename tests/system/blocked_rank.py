"""The process of a rank whose exchanges stop in the midst of steps: the queue of its network is full, or it computes for long.

BLOCKED: "full", or the seconds for which it computes."""

from __future__ import annotations

import os
import socket
import time
from itertools import count

import torch

from penstock.parallel.group import Group
from penstock.worker import process

_AFTER = 600
"""Exchanges that succeed: those of the start, and of some steps."""
_gather, _made = Group.gather, count()


def gather(self: Group, x: torch.Tensor) -> torch.Tensor:
    if self.rank == 1 and next(_made) == _AFTER:
        if os.environ["BLOCKED"] == "full":
            sending, _reading = socket.socketpair()
            while True:
                sending.sendall(bytes(1 << 20))
        until = time.process_time() + float(os.environ["BLOCKED"])
        while time.process_time() < until:
            torch.ones(100, 100) @ torch.ones(100, 100)
    return _gather(self, x)


if __name__ == "__main__":
    Group.gather = gather  # type: ignore[method-assign]
    process.main()
