"""Finds rows with shared prefixes by comparing the host's block tables, independently of what filled them.

Decoding rows are kept sorted by their page ids, so that rows with long common prefixes are adjacent. A row is inserted at its
first decode step, when the pages of its prompt are allocated, and removed when it leaves or one of these pages is replaced;
pages that it gets later are not shared. If the rows are the same as in the last step, the cost is one comparison."""

import bisect

import numpy as np
import numpy.typing as npt

from penstock.core.plan import Ints, StepPlan
from penstock.ops.attention import SharedPrefixes


class Sharing:
    """Sorted rows of one block table. `forget` and `edited` must be called for every change of the table."""

    def __init__(self, table: Ints, page: int) -> None:
        """table [rows, columns]: page ids, of layers that keep all their entries."""
        self._table = table
        self._page = page
        self._placed = np.full(len(table), -1, np.int32)
        """[rows] number of pages in the row's sort key; -1 if the row is not sorted in."""
        self._order: list[tuple[bytes, int]] = []
        """(page ids as bytes, row), sorted."""
        self._rows = np.zeros(len(table), np.int32)
        """The rows in sorted order."""
        self._common = np.zeros(len(table), np.int32)
        """Number of first pages that each row shares with the next one in sorted order."""
        self._asked = b"", b""
        self._answer: SharedPrefixes | None = None
        self._changed = False

    def forget(self, rows: list[int]) -> None:
        """Removes rows that leave or are reassigned."""
        for row in rows:
            if self._placed[row] >= 0:
                self._remove(row)

    def edited(self, edits: Ints) -> None:
        """Takes in changed entries of the table, [edits, 3]: row, page index, page id."""
        if self._order and len(edits):
            exchanged = edits[:, 1] < self._placed[edits[:, 0]]
            if exchanged.any():
                self.forget(edits[exchanged, 0].tolist())

    def of(self, plan: StepPlan) -> SharedPrefixes | None:
        """Returns the shared prefixes of the plan's decode segments, or None. Returns the same object while nothing changes."""
        if len(plan.rows) < 2:
            return None
        asked = plan.rows.tobytes(), plan.counts.tobytes()
        if asked == self._asked and not self._changed:
            return self._answer
        segments = np.flatnonzero(plan.counts == 1)
        for segment in segments[self._placed[plan.rows[segments]] < 0].tolist():
            begin = int(plan.starts[segment]) - (0 if plan.slack is None else int(plan.slack[segment]))
            self._place(int(plan.rows[segment]), begin // self._page)
        self._asked, self._changed = asked, False
        self._answer = self._shared(plan.rows, segments)
        return self._answer

    def _shared(self, rows: Ints, segments: npt.NDArray[np.int64]) -> SharedPrefixes | None:
        known = len(self._order)
        if known < 2 or not self._common[:known - 1].any():
            return None
        segment_of = np.full(len(self._placed), -1, np.int32)
        segment_of[rows[segments]] = segments
        found = segment_of[self._rows[:known]]
        places = np.flatnonzero(found >= 0)
        if len(places) < 2:
            return None
        common = np.minimum.reduceat(self._common[:places[-1]], places[:-1])
        return SharedPrefixes(found[places], common * self._page) if common.any() else None

    def _place(self, row: int, pages: int) -> None:
        entry = self._table[row, :pages].tobytes(), row
        at, last = bisect.bisect_left(self._order, entry), len(self._order)
        self._order.insert(at, entry)
        self._placed[row] = pages
        for array in (self._rows, self._common):
            array[at + 1:last + 1] = array[at:last]
        self._rows[at] = row
        if at:
            self._common[at - 1] = self._compare(at - 1)
        self._common[at] = self._compare(at) if at < last else 0
        self._changed = True

    def _remove(self, row: int) -> None:
        last = len(self._order) - 1
        at = int(np.flatnonzero(self._rows[:last + 1] == row)[0])
        del self._order[at]
        self._placed[row] = -1
        if at:
            self._common[at - 1] = min(self._common[at - 1], self._common[at])
        for array in (self._rows, self._common):
            array[at:last] = array[at + 1:last + 1]
        self._changed = True

    def _compare(self, at: int) -> int:
        """Returns the number of first pages that the rows at places `at` and `at` + 1 share."""
        one, other = self._rows[at:at + 2]
        pages = min(self._placed[one], self._placed[other])
        differs = self._table[one, :pages] != self._table[other, :pages]
        first = int(differs.argmax()) if pages else 0
        return first if pages and differs[first] else int(pages)
