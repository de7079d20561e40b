"""A page as bytes in a store: a header that says what it is, and the page's bytes.

Header, 80 bytes, little-endian: magic, version (16 bytes), cache group (4), key (32), length of the page (8), checksum of the
page (4, `checksum`), CRC-32 of the header so far (4), zeros. Against people who can write to the store nothing here would help.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

from penstock.core.transfer import PageName

_FIELDS = struct.Struct("<8s16sI32sQI")
_CRC = struct.Struct("<I")
_LINE = 4096
"""Bytes that are summed in one go: what disks and file systems lose as a whole."""
MAGIC = b"PENPAGE2"
"""Changes when anything said above does."""

HEADER_BYTES = 80


def checksum(page: memoryview) -> int:
    """CRC-32 of what is left beyond whole lines of 4096 bytes, of each line's sum and of each column's, all of 64-bit
    little-endian words, modulo 2^64.

    Damage within one line changes the sums of columns, as up to three flipped bits anywhere change some sum, so both are found
    as by a CRC-32 of the whole; more than that would have to add up in lines and columns. A CRC-32 of the whole takes four
    times as long as this, and twice as long as reading the page.
    """
    whole = page.nbytes - page.nbytes % _LINE
    words = np.frombuffer(page[:whole], "<u8").reshape(-1, _LINE // 8)
    found = zlib.crc32(page[whole:])
    for axis in (1, 0):
        found = zlib.crc32(words.sum(axis, dtype="<u8").tobytes(), found)
    return found


def header(version: bytes, name: PageName, page: memoryview) -> bytes:
    """The header of a page."""
    fields = _FIELDS.pack(MAGIC, version, name.group, name.key, page.nbytes, checksum(page))
    return (fields + _CRC.pack(zlib.crc32(fields))).ljust(HEADER_BYTES, b"\0")


def fault(version: bytes, name: PageName, head: bytes | memoryview, page: memoryview) -> str | None:
    """Why these bytes are not that page of that version; None if they are."""
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
    if expected != checksum(page):
        return "its checksum is wrong"
    return None
