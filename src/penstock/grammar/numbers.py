"""Keeps the numbers of JSON within a double. llguidance bounds neither their digits nor their exponents, and 1e999 is infinite
to most readers: tokens that would make the number being written overflow are excluded."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable

import numpy as np

from penstock.core.plan import Ints

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
    """Of one vocabulary."""

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
        self._large = _words(large)
        self._strings = [single[text] for text in (b"x", b'"') if text in single]
        """A mask with one of these is within a string."""
        self._overflowing = functools.lru_cache(1024)(self._find_overflowing)

    def bound(self, tokens: list[int], line: Ints, first: int = 0) -> None:
        """Excludes from the mask behind `tokens` what would overflow; the answer begins at `first`. Never excludes all."""
        end = self._ends.get(tokens[-1]) if len(tokens) > first else None
        if end is None and not len(self._large):
            return
        words = line.view(np.uint32)
        if any(words[token // 32] >> np.uint32(token % 32) & 1 for token in self._strings):
            return
        _take_away(words, self._large)
        begun = _BEGUN.search(self._end(tokens[max(first, len(tokens) - _LONGEST):])) if end is not None else None
        if begun is not None and (len(begun[0]) > _SAFE_DIGITS or b"e" in begun[0] or b"E" in begun[0]):
            _take_away(words, self._overflowing(begun[0]))

    def _end(self, tokens: list[int]) -> bytes:
        """The number characters at the end of a text."""
        parts: list[bytes] = []
        for token in reversed(tokens):
            parts.append(self._ends.get(token, b""))
            if token not in self._whole:
                break
        return b"".join(reversed(parts))

    def _find_overflowing(self, begun: bytes) -> Ints:
        found = [token for token, lead in self._leads
                 if (number := _NUMBER.match(begun + lead)) is not None and math.isinf(float(number[0]))]
        return _words(found)


def _words(tokens: list[int]) -> Ints:
    """A mask of these tokens, as long as it must be."""
    bits = np.zeros((max(tokens, default=-1) // 32 + 1) * 32, np.uint8)
    bits[tokens] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _take_away(words: np.ndarray[tuple[int], np.dtype[np.uint32]], excluded: Ints) -> None:
    count = len(excluded)
    left = words[:count] & ~excluded.view(np.uint32)
    if left.any() or words[count:].any():
        words[:count] = left
