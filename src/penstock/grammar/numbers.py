"""Keeps the numbers of JSON within a double. llguidance bounds neither their digits nor their exponents, and 1e999 is infinite
to most readers: tokens that would make the number being written overflow are excluded."""

import functools
import math
import re
from collections.abc import Iterable, Sequence as List

import numpy as np

from penstock.core.plan import Ints

Words = np.ndarray[tuple[int], np.dtype[np.uint32]]

_CHARACTERS = b"0123456789.eE+-"
_NUMBER = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_BEGUN = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?(?:[eE]\+?[0-9]*)?$")
"""A number that may still grow, at the end of a text."""
_LARGE = re.compile(rb"[eE]\+?[0-9]{3}")
_SAFE_DIGITS = 250
"""A number of so few characters without an exponent grows by no token beyond a double. Tokens are shorter than the rest."""
_LONGEST = 1000
"""Tokens that a number is followed back through."""


class Numbers:
    def __init__(self, tokens: Iterable[bytes]) -> None:
        self._ends: dict[int, bytes] = {}
        """The number characters at the ends of tokens that have some."""
        self._whole: set[int] = set()
        """Tokens of number characters alone."""
        self._leads: list[tuple[int, bytes]] = []
        """The number characters at the beginnings of tokens."""
        large, single = [], {}
        for token, text in enumerate(tokens):
            if len(text) == 1:
                single[text] = token
            if text[:1] not in _CHARACTERS and text[-1:] not in _CHARACTERS and not _LARGE.search(text):
                continue
            end = text[len(text.rstrip(_CHARACTERS)):]
            lead = text[:len(text) - len(text.lstrip(_CHARACTERS))]
            if end:
                self._ends[token] = end
            if end and end == text:
                self._whole.add(token)
            if any(48 <= byte < 58 for byte in lead):
                self._leads.append((token, lead))
            if _LARGE.search(text):
                large.append(token)
        self._places, self._large = _words(large)
        """Tokens with a large exponent."""
        self._strings = [single[text] for text in (b"x", b'"') if text in single]
        """A mask with one of these is within a string."""
        self._overflowing = functools.lru_cache(1024)(self._find_overflowing)

    def bound(self, rows: Iterable[tuple[int, List[int], int]], bits: Ints) -> None:
        """Excludes what would overflow, but never all. `rows`: (line of `bits`, tokens before, where the answer begins)."""
        words = bits.view(np.uint32)
        strings = np.zeros(len(bits), np.uint32)
        for token in self._strings:
            strings |= words[:, token // 32] & np.uint32(1 << token % 32)
        large = (words[:, self._places] & self._large).any(1)
        inside: list[int] = strings.tolist()
        risky: list[bool] = np.atleast_1d(large).tolist()
        ends = self._ends
        for line, tokens, first in rows:
            if inside[line]:
                continue
            if risky[line]:
                _take_away(words[line], self._places, self._large)
            if len(tokens) > first and tokens[-1] in ends:
                begun = _BEGUN.search(self._end(tokens[max(first, len(tokens) - _LONGEST):]))
                if begun is not None and (len(begun[0]) > _SAFE_DIGITS or b"e" in begun[0] or b"E" in begun[0]):
                    _take_away(words[line], *self._overflowing(begun[0]))

    def _end(self, tokens: List[int]) -> bytes:
        """The number characters at the end of a text."""
        parts: list[bytes] = []
        for token in reversed(tokens):
            parts.append(self._ends.get(token, b""))
            if token not in self._whole:
                break
        return b"".join(reversed(parts))

    def _find_overflowing(self, begun: bytes) -> tuple[Ints, Words]:
        return _words(token for token, lead in self._leads
                      if (number := _NUMBER.match(begun + lead)) is not None and math.isinf(float(number[0])))


def _words(tokens: Iterable[int]) -> tuple[Ints, Words]:
    """The words of a mask that have bits of these tokens: their places, and the bits."""
    found: dict[int, int] = {}
    for token in tokens:
        found[token // 32] = found.get(token // 32, 0) | 1 << token % 32
    return np.array(list(found), np.int32), np.array(list(found.values()), np.uint32)


def _take_away(words: Words, places: Ints, excluded: Words) -> None:
    kept = words[places]
    words[places] = kept & ~excluded
    if not words.any():
        words[places] = kept
