"""Rows with shared prefix pages. Found from the host's block tables alone, so it is right whatever filled them.

Rows that decode stand in the order of their pages, so those that share most are neighbours. A row is put in its place at its
first step of one token, when the pages of its prompt are there, and taken out when it leaves or one of these pages is
exchanged; pages that it gets later are its own. A step of the same rows as the last one costs a comparison.
"""

from __future__ import annotations

import bisect

import numpy as np
import numpy.typing as npt

from penstock.core.plan import Ints, StepPlan
from penstock.ops.attention import SharedPrefixes


class Sharing:
    """The order of a table's rows. Told of all that changes in the table; `of` may be asked at any step."""

    def __init__(self, table: Ints, page: int) -> None:
        """table [rows, columns]: page ids, of layers that keep all their entries."""
        self._table = table
        self._page = page
        self._placed = np.full(len(table), -1, np.int32)
        """Of each row how many pages its place goes by; -1 if it has none."""
        self._order: list[tuple[bytes, int]] = []
        """Pages and row, sorted."""
        self._rows = np.zeros(len(table), np.int32)
        """The rows in that order,"""
        self._common = np.zeros(len(table), np.int32)
        """and how many first pages each shares with the next."""
        self._asked = b"", b""
        self._answer: SharedPrefixes | None = None
        self._changed = False

    def forget(self, rows: list[int]) -> None:
        """Rows leave, or are about to be somebody else's."""
        for row in rows:
            if self._placed[row] >= 0:
                self._remove(row)

    def edited(self, edits: Ints) -> None:
        """Lines (row, page index, page) of the table have changed."""
        if self._order and len(edits):
            exchanged = edits[:, 1] < self._placed[edits[:, 0]]
            if exchanged.any():
                self.forget(edits[exchanged, 0].tolist())

    def of(self, plan: StepPlan) -> SharedPrefixes | None:
        """Shared prefixes of the plan's decoding segments; None if there are none. The same object while nothing changes."""
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
        """How many first pages the rows at this place and the next share."""
        one, other = self._rows[at:at + 2]
        pages = min(self._placed[one], self._placed[other])
        differs = self._table[one, :pages] != self._table[other, :pages]
        first = int(differs.argmax()) if pages else 0
        return first if pages and differs[first] else int(pages)
