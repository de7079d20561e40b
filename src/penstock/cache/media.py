"""Media in contexts: placeholder tokens are told apart by what stands behind them.

To a model an image is a run of equal placeholder tokens, but the entries at these positions come from the image. So the index
knows such positions by a word of the medium's own, a negative number where tokens are never negative: equal words mean equal
contents, in this process. In keys, which other processes read, the contents' digest itself stands for it (`runs`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.request import Medium

_MOST = 1 << 16
"""Media that are remembered; what is forgotten is not found again, which costs time alone."""
_UNKNOWN = bytes(32)


class Run(NamedTuple):
    """Consecutive positions of one medium, within some stretch of a context."""

    at: int
    length: int
    digest: bytes
    token: int
    """The placeholder."""


class _Words:
    """The words of media. A word is never given a second meaning. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._words: OrderedDict[tuple[bytes, int], int] = OrderedDict()
        """By digest and placeholder, least recently used first."""
        self._meanings: dict[int, tuple[bytes, int]] = {}
        self._last = 0

    def word(self, digest: bytes, token: int) -> int:
        with self._lock:
            found = self._words.get((digest, token))
            if found is None:
                self._last -= 1
                found = self._words[digest, token] = self._last
                self._meanings[found] = digest, token
                if len(self._words) > _MOST:
                    del self._meanings[self._words.popitem(last=False)[1]]
            else:
                self._words.move_to_end((digest, token))
            return found

    def meaning(self, word: int) -> tuple[bytes, int] | None:
        return self._meanings.get(word)


_WORDS = _Words()


def put(words: bytearray, start: int, media: list[Medium], tokens: list[int]) -> None:
    """Puts the words of media in the place of placeholders. `words` are int32, those of the positions from `start` on;
    `tokens` all of the context's."""
    view: npt.NDArray[np.int32] = np.frombuffer(words, np.int32)
    end = start + len(view)
    for medium in media:
        first, last = max(medium.start, start), min(medium.start + medium.count, end)
        if first < last:
            view[first - start:last - start] = _WORDS.word(medium.digest, tokens[medium.start])


def runs(words: npt.NDArray[np.int32]) -> list[Run]:
    """The media in a stretch of words, in order. One that was forgotten has a digest that no medium has."""
    found: list[Run] = []
    places = np.flatnonzero(words < 0)
    if len(places):
        # A run ends where the next place does not follow, or has another word.
        breaks = np.flatnonzero((np.diff(places) > 1) | (np.diff(words[places]) != 0)) + 1
        for run in np.split(places, breaks):
            digest, token = _WORDS.meaning(int(words[run[0]])) or (_UNKNOWN + words[run[0]].tobytes(), 0)
            found.append(Run(int(run[0]), len(run), digest, token))
    return found
