"""Verifies drafted tokens (speculative decoding): the only place where drafts are compared with sampled tokens.

At each position of a segment with drafts a token is sampled as if all drafts before it were right. Drafts are accepted up to
the first that differs from the sampled token, and that sampled token is kept too. Sampling is a function of logits,
parameters, seed and position, so the kept tokens are exactly those of decoding one by one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.plan import Ints, StepPlan, Want
from penstock.worker.rows import Rows
from penstock.worker.sampler import LogitsRows
from penstock.worker.staging import Staging, to_host

_FAR = 2**31 - 1


class Verifier:
    """Verifies drafts for the rows of one worker."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._staging = Staging(torch.int32, rows.device)

    def drafts(self, lines: LogitsRows) -> torch.Tensor:
        """Returns the tokens [L] now at the positions of the logits rows. Call before sampling overwrites them."""
        return self._rows.tokens[lines.row.long(), lines.position.long()]

    def verify(self, plan: StepPlan, lines: LogitsRows, drafts: torch.Tensor, chosen: torch.Tensor) -> Verified:
        """Compares drafts and sampled tokens [L] of all logits rows of a step, and updates the lengths of their rows."""
        first = np.flatnonzero(np.diff(lines.segments, prepend=-1))
        count = np.diff(first, append=len(lines.segments))
        host, size = self._staging.host(2 * len(chosen) + len(first)), len(chosen)
        host[:size] = np.repeat(np.arange(len(first)), count)
        # The token sampled after a segment's last position has no draft to compare with.
        host[size:2 * size] = np.arange(size) - np.repeat(first, count)
        host[size + first + count - 1] += _FAR // 2
        host[2 * size:2 * size + len(first)] = first
        self._staging.send(2 * size + len(first))
        group, offset, begin = self._staging.device(2 * size + len(first)).split([size, size, len(first)])
        within = offset % (_FAR // 2)
        differs = (offset >= _FAR // 2) | (drafts != chosen)
        kept = torch.full((len(first),), _FAR, dtype=torch.int32, device=chosen.device)
        kept.scatter_reduce_(0, group.long(), torch.where(differs, within, _FAR), "amin")
        kept += 1
        row, length = lines.row[begin.long()], lines.position[begin.long()] + kept
        self._rows.length[row.long()] = length
        return Verified(plan, lines.segments[first], row, length, begin, kept)


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
