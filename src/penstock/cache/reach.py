"""The prefix-hit rule: the largest n at which every cache group has the pages it needs to continue. Pure arithmetic.

It depends only on `core/state.py::Retention`, so full attention, sliding windows, chunked attention, recurrent snapshots, draft
heads and every mixture of them follow the same rule.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.core.state import Retention

Places = npt.NDArray[np.int32]
"""Shape [pages], for one group: the page id of each page-sized range of positions, -1 where there is no page."""


def reach(keeps: Sequence[Retention], places: Sequence[Places], page: int, matched: int, limit: int, sealed: int) -> int:
    """The largest n <= limit such that every group has, in `places`, all pages that contain positions it needs at n. If n is
    inside a page, the group must have that page too: it is copied and continued, and a later match may need its beginning.

    The first `matched` positions have equal tokens; the last page may extend beyond them. Snapshots (`Retention.exact`) are
    valid only at page boundaries and at `sealed`, the end of a partial last page (-1 if there is none).
    """
    n = min(matched, limit)
    holes = [np.flatnonzero(ids < 0) for ids in places]
    while n > 0:
        best = min(_fits(keep, ids, gaps, page, min(n, matched - keep.ahead), sealed)
                   for keep, ids, gaps in zip(keeps, places, holes, strict=True))
        if best == n:
            return n
        n = max(0, best)
    return 0


def _fits(keep: Retention, ids: Places, holes: npt.NDArray[np.int64], page: int, n: int, sealed: int) -> int:
    """The largest m <= n at which one group can continue."""
    while n > 0:
        low = min(keep.needed(n)[0], n - n % page)
        if low >= n:
            return n
        last = (n - 1) // page
        if last >= len(ids):
            # A range that begins at a page boundary behind the last page, such as a new attention chunk, needs no page.
            n = low if low % page == 0 and low > len(ids) * page and keep.needed(low)[0] >= low else len(ids) * page
            continue
        if keep.exact and n % page and n != sealed:
            n = last * page
            continue
        # The nearest missing page at or below the last needed page.
        at = bisect_left(holes, last + 1) - 1
        hole = int(holes[at]) if at >= 0 else -1
        if hole < low // page:
            return n
        n = hole * page
    return 0
