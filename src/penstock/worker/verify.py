"""Which drafted tokens are kept: the one place where drafts are compared with what was chosen.

Every position of a checked segment had its token chosen as if the drafts before it were right. So a draft that equals what was
chosen in its place is kept, up to the first that does not; what was chosen there is kept instead. A choice is a function of
logits, parameters, seed and position, so the kept tokens are exactly those of decoding one by one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.plan import Ints, StepPlan, Want
from penstock.worker.rows import Rows
from penstock.worker.sampler import Lines
from penstock.worker.staging import Staging, to_host

_FAR = 2**31 - 1


class Verifier:
    """Serves the rows of one worker."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._staging = Staging(torch.int32, rows.device)

    def drafts(self, lines: Lines) -> torch.Tensor:
        """[L] the tokens that stand where those of the lines will be written. To be taken before they are."""
        return self._rows.tokens[lines.row.long(), lines.position.long()]

    def verify(self, plan: StepPlan, lines: Lines, drafts: torch.Tensor, chosen: torch.Tensor) -> Verified:
        """Given drafts and chosen tokens [L] of all lines of a step. Sets the length of the lines' rows."""
        first = np.flatnonzero(np.diff(lines.segments, prepend=-1))
        count = np.diff(first, append=len(lines.segments))
        host, size = self._staging.host(2 * len(chosen) + len(first)), len(chosen)
        host[:size] = np.repeat(np.arange(len(first)), count)
        # Nothing is compared with what is chosen behind a segment's last position.
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
    """Numbers of tokens that segments keep, on their way to the host."""

    def __init__(self, plan: StepPlan, segments: npt.NDArray[np.int64], row: torch.Tensor, length: torch.Tensor,
                 first: torch.Tensor, kept: torch.Tensor) -> None:
        self.segments = segments
        """[S] of the plan."""
        self.row = row
        """[S] int32, on the device."""
        self.length = length
        """[S] int32, on the device: how many tokens each row knows now."""
        self.first = first
        """[S] int32, on the device: the first of each segment's lines."""
        self._each = (plan.wants & int(Want.EACH)) > 0
        self._starts = plan.starts
        self._kept = to_host(kept)

    def kept(self) -> Ints:
        """[segments of the plan] how many tokens each keeps."""
        found = np.zeros(len(self._each), np.int32)
        found[self.segments] = self._kept.numpy()
        return found

    def holds(self, kept: Ints, segments: npt.NDArray[np.integer], positions: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Which lines, of these segments and positions (as the plan bounds them), are about tokens that are kept."""
        found: npt.NDArray[np.bool_] = ~self._each[segments] | (positions - self._starts[segments] <= kept[segments])
        return found
