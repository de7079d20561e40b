"""Updates the work list of the previous decode step for the next one instead of building a new one.

From one decode step to the next every context grows by one position. Until a context crosses into a new block of keys, only the
query positions and the ends of the last key ranges change. Building a work list takes 50 to 100 us on the host, which a small
model's step cannot hide; updating one takes a few us."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.ops.attention import Geometry, Ints, SharedPrefixes
from penstock.ops.attention_work import FIELDS, WorkItem, layout

_WORTH = 3
"""Minimum number of updates for which a work list is kept: keeping one costs as much as two updates save."""


@dataclass(slots=True)
class _Last:
    """The work list of the last step, and for how many more steps it can be updated."""

    context: Ints
    segments: int
    shared: SharedPrefixes | None
    work: Ints
    moving: npt.NDArray[np.int64]
    """Indices into `work` of the elements that grow by one each step: query positions, and key ends at the end of a context."""
    left: int
    """Steps until a context enters another block of keys."""


class Divider:
    """Makes the work lists of one step builder's decode steps, for one geometry. Not thread-safe."""

    def __init__(self, geometry: Geometry, invariant: bool, divide: Callable[..., Ints]) -> None:
        """`divide`: AttentionOps.prepare for the geometry."""
        self._geometry = geometry
        self._invariant = invariant
        self._divide = divide
        self._last: _Last | None = None

    def decode(self, counts: Ints, context: Ints, segments: int, shared: SharedPrefixes | None) -> Ints:
        """Returns the work list of a decode step padded to `segments`. The array is valid until the next call."""
        last = self._last
        if (last is not None and last.left > 0 and last.segments == segments and last.shared is shared
                and len(last.context) == len(context) and bool((context == last.context + 1).all())):
            last.work[last.moving] += 1
            last.context = context
            last.left -= 1
            return last.work
        work = self._divide(counts, context, segments, segments, shared=shared)
        self._last = self._remember(work, context, segments, shared)
        return work

    def _remember(self, work: Ints, context: Ints, segments: int, shared: SharedPrefixes | None) -> _Last | None:
        launch = layout(self._geometry, segments, segments, self._invariant).narrow
        left = self._steps_left(context, launch.shape.block_n)
        if left < _WORTH:
            return None
        items = work[launch.offset:launch.offset + launch.items * FIELDS].reshape(-1, FIELDS)
        active = np.flatnonzero(items[:, WorkItem.QUERIES] > 0)
        if not len(active):
            return None
        chosen = items[active]
        # Shared-prefix tiles read only keys that precede all of their queries, so they do not change.
        own = (chosen[:, WorkItem.LISTED] == 0) | (chosen[:, WorkItem.QUERIES] == 1) & (
            chosen[:, WorkItem.POSITION] == context[chosen[:, WorkItem.SEGMENT]] - 1)
        active, chosen = active[own], chosen[own]
        at_end = chosen[:, WorkItem.END] == chosen[:, WorkItem.POSITION] + 1
        first = launch.offset + active * FIELDS
        moving = np.concatenate((first + WorkItem.POSITION, first[at_end] + WorkItem.END))
        return _Last(context, segments, shared, work, moving, left)

    def _steps_left(self, context: Ints, unit: int) -> int:
        """Number of steps until a context enters, or a sliding window leaves, a block of keys."""
        left = int((-context % unit).min())
        if self._geometry.window:
            behind = context - self._geometry.window
            left = min(left, int((unit - 1 - np.where(behind >= 0, behind % unit, behind)).min()))
        return left
