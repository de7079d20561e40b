"""When two contexts are the same: a chain of hashes over pages of tokens, rooted in model, adapter and the tenant's salt.

Equal keys mean equal tokens and media from the first on, computed by the same weights for the same namespace, so a page of
equal key holds equal bytes. BLAKE2b: collisions cannot be constructed, as a cache shared between users requires. A key
depends on nothing but what is said here, so that it is the same in every process, on every machine and after every restart
(docs/cache.md, "Keys"; `SCHEMA` changes if this does).
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from penstock.cache import media

Key = bytes
"""`SIZE` bytes."""

SIZE = 32
"""Bytes of a key: what consumers of vLLM's KV events take a hash of bytes to be."""

SCHEMA = 1
"""The version of the rules below. Part of every root, so that no key of one version equals one of another."""

_TOKEN_BYTES = 4


def root(model: str, adapter: str = "", salt: str = "") -> Key:
    """The key before the first page.

    BLAKE2b-256, personal string "penstock" and the version's digits, of the three texts in UTF-8, each behind its length as 8
    bytes, little-endian.
    """
    hashed = blake2b(digest_size=SIZE, person=b"penstock%d" % SCHEMA)
    for part in (model, adapter, salt):
        data = part.encode()
        hashed.update(len(data).to_bytes(8, "little") + data)
    return hashed.digest()


def chain(parent: Key, tokens: Sequence[int], page: int) -> list[Key]:
    """Keys of the whole pages of `tokens`, of which the first follows `parent`: BLAKE2b-256 of the parent's key and the page's
    tokens (`packed`)."""
    return links(parent, packed(tokens), page)


def links(parent: Key, data: bytes | bytearray, page: int) -> list[Key]:
    """The same of tokens that are `packed` already, with words in the place of media (`cache/media.py`). Some 0.7 us a page.

    A page with media is hashed with its placeholders, and behind them for each run of positions of one medium: the first of
    these positions in the page and their number, 4 bytes each, little-endian, and the medium's digest behind its length as 8
    bytes.
    """
    width, keys = page * _TOKEN_BYTES, []
    mixed = bool((np.frombuffer(data, np.int32) < 0).any())
    for start in range(0, len(data) - width + 1, width):
        piece = data[start:start + width]
        parent = blake2b(parent + (_with_media(piece) if mixed else piece), digest_size=SIZE).digest()
        keys.append(parent)
    return keys


def _with_media(piece: bytes | bytearray) -> bytes:
    """The bytes of one page with media that enter its hash."""
    words = np.frombuffer(piece, np.int32).copy()
    tail = b""
    for run in media.runs(words):
        tail += struct.pack("<iiQ", run.at, run.length, len(run.digest)) + run.digest
        words[run.at:run.at + run.length] = run.token
    return words.astype("<i4").tobytes() + tail


def packed(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes: 4 each, little-endian."""
    words = array("i", tokens)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def number(key: Key) -> int:
    """A key as an unsigned integer of 64 bits, its last 8 bytes read big-endian: what routers know a block by."""
    return int.from_bytes(key[-8:], "big")
