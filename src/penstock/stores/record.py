"""The record format of a page in a store: a header that identifies the page, followed by the page's bytes.

Header, 80 bytes, little-endian: magic, version (16 bytes), cache group (4), key (32), the page's length (8), its `checksum`
(4), CRC-32 of all this (4), zeros. The checksums detect damage, not tampering: who can write to the store can forge pages."""

import struct
import zlib

import numpy as np
import numpy.typing as npt

from penstock.core.plan import PageName

_FIELDS = struct.Struct("<8s16sI32sQI")
_CRC = struct.Struct("<I")
_LINE = 4096
"""Bytes per checksum line: the unit that disks and file systems lose as a whole."""
MAGIC = b"PENPAGE2"
"""The magic of this format; changes when the format does."""

HEADER_BYTES = 80

Sums = npt.NDArray[np.uint64]
"""The sums of a page's whole lines, followed by the sums of its columns; `sums_of(nbytes)` numbers."""


def sums_of(nbytes: int) -> int:
    """The number of sums of a page with `nbytes` bytes."""
    return nbytes // _LINE + _LINE // 8


def checksum(page: memoryview, sums: Sums | None = None) -> int:
    """The CRC-32 of three parts: the bytes beyond the last whole 4096-byte line, the sum of each line, and the sum of each
    column. Sums are of 64-bit little-endian words, modulo 2^64.

    Damage within one line changes column sums, and up to three flipped bits anywhere change some sum, so both are detected as
    by a CRC-32 of the whole page; other damage would have to cancel out in both lines and columns. A CRC-32 of the whole page
    takes four times as long as this, and twice as long as reading the page. The caller may pass `sums` if it has them."""
    whole = page.nbytes - page.nbytes % _LINE
    if sums is None:
        words = np.frombuffer(page[:whole], "<u8").reshape(-1, _LINE // 8)
        sums = np.concatenate([words.sum(axis, dtype="<u8") for axis in (1, 0)])
    lines = whole // _LINE
    # Separate calls: zlib releases the GIL for more than 5 KiB at a time, and reacquiring it takes time.
    return zlib.crc32(sums[lines:].data, zlib.crc32(sums[:lines].data, zlib.crc32(page[whole:])))


def header(version: bytes, name: PageName, page: memoryview) -> bytes:
    fields = _FIELDS.pack(MAGIC, version, name.group, name.key, page.nbytes, checksum(page))
    return (fields + _CRC.pack(zlib.crc32(fields))).ljust(HEADER_BYTES, b"\0")


def fault(version: bytes, name: PageName, head: bytes | memoryview, page: memoryview, sums: Sums | None = None) -> str | None:
    """The reason why these bytes are not this page of this version; None if they are. `sums` of the page, if known."""
    fields = bytes(head[:_FIELDS.size])
    if _CRC.unpack_from(head, _FIELDS.size)[0] != zlib.crc32(fields):
        return "the header's checksum is wrong"
    magic, found, group, key, nbytes, expected = _FIELDS.unpack(fields)
    if magic != MAGIC or found != version:
        return "it is of another version"
    if (group, key) != (name.group, name.key):
        return "it is another page"
    if nbytes != page.nbytes:
        return f"it has {nbytes} bytes, not {page.nbytes}"
    if expected != checksum(page, sums):
        return "its checksum is wrong"
    return None
