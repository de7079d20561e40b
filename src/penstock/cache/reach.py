"""The one rule of prefix hits: the longest n at which every group of layers has what it needs to continue. Pure arithmetic.

It asks nothing but `core/state.py::Retention`, so full attention, windows, chunks, recurrent snapshots, draft heads and any
mixture of them are one case.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.core.state import Retention

Places = npt.NDArray[np.int32]
"""For one group [pages]: the page id of each stretch of positions, -1 where there is none."""


def reach(keeps: Sequence[Retention], places: Sequence[Places], page: int, matched: int, limit: int, sealed: int) -> int:
    """The largest n <= limit such that every group holds, in `places`, all pages that touch the positions it needs at n, and
    the page that n lies in if it is inside one: that page is cut there, and whoever finds it later may need its beginning.

    `matched` positions have equal tokens; the last page may lie only partly below that. Exact states serve at page borders,
    and at `sealed`, where the last page ends that is not full (-1 if there is none).
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
            # A stretch that begins at a page border behind the last page, as a chunk may, needs no page.
            n = low if low % page == 0 and low > len(ids) * page and keep.needed(low)[0] >= low else len(ids) * page
            continue
        if keep.exact and n % page and n != sealed:
            n = last * page
            continue
        # The nearest hole at or below the last page that is needed.
        at = bisect_left(holes, last + 1) - 1
        hole = int(holes[at]) if at >= 0 else -1
        if hole < low // page:
            return n
        n = hole * page
    return 0
