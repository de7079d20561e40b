"""Content keys of pages: a hash chain over pages of tokens, rooted in model, adapter and the tenant's salt.

Equal keys mean equal tokens and media from the first position on, computed by the same weights in the same namespace, so pages
with equal keys hold equal bytes. The hash is BLAKE2b, because a cache shared between users needs collision resistance. A key
depends on nothing else, so it is the same in every process, on every machine and after every restart (docs/cache.md, "Keys";
`SCHEMA` changes if this does)."""

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
"""Bytes of a key; the length that consumers of vLLM's KV events expect of a hash in bytes."""

SCHEMA = 1
"""The version of the key derivation. It is hashed into every root, so keys of different versions never match."""

_TOKEN_BYTES = 4


def root(model: str, adapter: str = "", salt: str = "") -> Key:
    """The parent key of the first page of a context.

    BLAKE2b-256 with the personalisation string "penstock" followed by the version's digits, over the three texts in UTF-8, each
    prefixed with its length as 8 bytes, little-endian."""
    hashed = blake2b(digest_size=SIZE, person=b"penstock%d" % SCHEMA)
    for part in (model, adapter, salt):
        data = part.encode()
        hashed.update(len(data).to_bytes(8, "little") + data)
    return hashed.digest()


def chain(parent: Key, tokens: Sequence[int], page: int) -> list[Key]:
    """The keys of the whole pages of `tokens` behind `parent`: the BLAKE2b-256 of parent key and page's tokens (`packed`)."""
    return links(parent, packed(tokens), page)


def links(parent: Key, data: bytes | bytearray, page: int) -> list[Key]:
    """`chain` for tokens that are `packed` already, with words in place of media (`cache/media.py`). About 0.7 us per page.

    A page with media is hashed with its placeholder tokens, then an entry for each run of one medium's positions: its first
    position in the page and its length, 4 bytes each, little-endian, then the medium's digest behind its length as 8 bytes."""
    width, keys = page * _TOKEN_BYTES, []
    mixed = bool((np.frombuffer(data, np.int32) < 0).any())
    for start in range(0, len(data) - width + 1, width):
        piece = data[start:start + width]
        parent = blake2b(parent + (_with_media(piece) if mixed else piece), digest_size=SIZE).digest()
        keys.append(parent)
    return keys


def _with_media(piece: bytes | bytearray) -> bytes:
    """The bytes that are hashed for a page with media."""
    words = np.frombuffer(piece, np.int32).copy()
    tail = b""
    for run in media.runs(words):
        tail += struct.pack("<iiQ", run.at, run.length, len(run.digest)) + run.digest
        words[run.at:run.at + run.length] = run.token
    return words.astype("<i4").tobytes() + tail


def packed(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes, 4 bytes each, little-endian."""
    words = array("i", tokens)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def number(key: Key) -> int:
    """The 64-bit unsigned block hash that routers use: the key's last 8 bytes, big-endian."""
    return int.from_bytes(key[-8:], "big")
