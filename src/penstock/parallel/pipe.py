"""Tensors on their way between pipeline stages: the stream to the next stage, and chosen tokens from the last to the first.

Both sides know from the plan how much comes, and in which order."""

from collections import deque
from typing import Any

import torch

from penstock.parallel.axis import Place
from penstock.parallel.group import as_bytes, subgroup


class Pipe:
    """The links of one stage, whose ranks are processes. Sending does not wait for the receiver; what was sent must not be
    overwritten. Each link is a group of its own, so that none waits for what another carries."""

    def __init__(self, place: Place, device: torch.device) -> None:
        import torch.distributed as dist

        width, stages = place.width, place.stages
        self._isend: Any = dist.isend
        self._irecv: Any = dist.irecv
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        """Kept until they have left."""
        self._next = self._previous = self._back = None
        for stage in range(stages):
            # The last of these links leads from the last stage to the first.
            ends = [(stage * width + within, (stage + 1) % stages * width + within) for within in range(width)]
            group = subgroup(ends, place.rank)
            if stage == stages - 1:
                self._back = group
            elif stage == place.stage:
                self._next = group
            elif stage == place.stage - 1:
                self._previous = group
        self._after, self._before = place.rank + width, place.rank - width
        self._first, self._last = place.within, (stages - 1) * width + place.within
        self._connect(place, torch.zeros(1, dtype=torch.uint8, device=device))

    def _connect(self, place: Place, mark: torch.Tensor) -> None:
        """Sends a byte over each link, one after another. With its first message NCCL connects both ends, so that the sender's
        host waits for the receiver's; in the midst of steps that may be for ever."""
        for stage in range(place.stages):
            if place.stage == stage:
                (self.send if stage < place.stages - 1 else self.send_back)(mark)
            elif place.stage == (stage + 1) % place.stages:
                (self.receive if stage < place.stages - 1 else self.receive_back)(mark)
        if mark.is_cuda:
            torch.cuda.synchronize(mark.device)

    def send(self, x: torch.Tensor) -> None:
        """To the next stage."""
        self._post(x, self._after, self._next)

    def receive(self, out: torch.Tensor) -> None:
        """From the previous stage, in its order of sending."""
        self._irecv(as_bytes(out), self._before, group=self._previous).wait()

    def send_back(self, tokens: torch.Tensor) -> None:
        """From the last stage to the first."""
        self._post(tokens, self._first, self._back)

    def receive_back(self, out: torch.Tensor) -> None:
        self._irecv(as_bytes(out), self._last, group=self._back).wait()

    def _post(self, x: torch.Tensor, to: int, group: Any) -> None:
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        flat = as_bytes(x.contiguous())
        self._sent.append((self._isend(flat, to, group=group), flat))
