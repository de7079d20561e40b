"""Media in contexts: distinguishes equal placeholder tokens by the media they stand for.

A model sees an image as a run of equal placeholder tokens, but the KV entries at these positions depend on the image. So the
index replaces each placeholder by a word of the medium, a negative number (token ids are never negative). Within this process
equal words mean equal contents. Content keys, which other processes read, use the digest of the contents instead (`runs`)."""

import threading
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.request import Medium

_MOST = 1 << 16
"""The number of media whose words are remembered (LRU). A forgotten medium is not matched again, which costs only time."""
_UNKNOWN = bytes(32)


class MediumRun(NamedTuple):
    """Consecutive positions of one medium, within some stretch of a context."""

    at: int
    length: int
    digest: bytes
    token: int
    """The placeholder."""


class _Words:
    """Assigns words to media. A word is never reused for another medium. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._words: OrderedDict[tuple[bytes, int], int] = OrderedDict()
        """By digest and placeholder, least recently used first."""
        self.meanings: dict[int, tuple[bytes, int]] = {}
        self._last = 0

    def word(self, digest: bytes, token: int) -> int:
        with self._lock:
            found = self._words.get((digest, token))
            if found is None:
                self._last -= 1
                found = self._words[digest, token] = self._last
                self.meanings[found] = digest, token
                if len(self._words) > _MOST:
                    del self.meanings[self._words.popitem(last=False)[1]]
            else:
                self._words.move_to_end((digest, token))
            return found


_WORDS = _Words()


def put(words: bytearray, start: int, media: list[Medium], tokens: list[int]) -> None:
    """Replaces placeholders in `words`, int32 tokens from position `start` on, by the media's; `tokens`: the context's."""
    view: npt.NDArray[np.int32] = np.frombuffer(words, np.int32)
    end = start + len(view)
    for medium in media:
        first, last = max(medium.start, start), min(medium.start + medium.count, end)
        if first < last:
            view[first - start:last - start] = _WORDS.word(medium.digest, tokens[medium.start])


def runs(words: npt.NDArray[np.int32]) -> list[MediumRun]:
    """The media runs in a range of words, in order. A forgotten medium gets a digest that no medium has."""
    found: list[MediumRun] = []
    places = np.flatnonzero(words < 0)
    if len(places):
        # A run ends where the next media position is not adjacent or has a different word.
        for run in np.split(places, np.flatnonzero((np.diff(places) > 1) | (np.diff(words[places]) != 0)) + 1):
            digest, token = _WORDS.meanings.get(int(words[run[0]])) or (_UNKNOWN + words[run[0]].tobytes(), 0)
            found.append(MediumRun(int(run[0]), len(run), digest, token))
    return found
