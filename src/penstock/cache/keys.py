"""When two contexts are the same: a chain of hashes over pages of tokens, rooted in the request's salt.

Equal keys mean equal tokens from the first on, and an equal namespace, so a page of equal key holds equal bytes. BLAKE2b
with 16 bytes: collisions cannot be constructed, as a shared cache between users requires.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

Key = bytes


def root(salt: str) -> Key:
    """The key before the first page."""
    return blake2b(salt.encode(), digest_size=16, person=b"penstock-root").digest()


def extend(parent: Key, tokens: Sequence[int]) -> Key:
    """The key of a page with these tokens after `parent`."""
    return blake2b(parent + array("i", tokens).tobytes(), digest_size=16).digest()


def chain(salt: str, tokens: Sequence[int], page: int) -> list[Key]:
    """Keys of the whole pages of `tokens`."""
    keys, key = [], root(salt)
    for start in range(0, len(tokens) - page + 1, page):
        key = extend(key, tokens[start:start + page])
        keys.append(key)
    return keys
