"""A page as bytes in a store: a header that says what it is, and the page's bytes.

Header, 80 bytes, little-endian: magic, version (16 bytes), cache group (4), key (32), length of the page (8), CRC-32 of the
page (4), CRC-32 of the header so far (4), zeros. CRC-32 because zlib computes it at 4 GB/s a thread, which is faster than disks
and than a cryptographic hash; against people who can write to the store nothing here would help.
"""

from __future__ import annotations

import struct
import zlib

from penstock.core.transfer import PageName

_FIELDS = struct.Struct("<8s16sI32sQI")
_CRC = struct.Struct("<I")
MAGIC = b"PENPAGE1"
"""Changes when anything said above does."""

HEADER_BYTES = 80


def header(version: bytes, name: PageName, page: memoryview) -> bytes:
    """The header of a page."""
    fields = _FIELDS.pack(MAGIC, version, name.group, name.key, page.nbytes, zlib.crc32(page))
    return (fields + _CRC.pack(zlib.crc32(fields))).ljust(HEADER_BYTES, b"\0")


def fault(version: bytes, name: PageName, head: bytes | memoryview, page: memoryview) -> str | None:
    """Why these bytes are not that page of that version; None if they are."""
    fields = bytes(head[:_FIELDS.size])
    if _CRC.unpack_from(head, _FIELDS.size)[0] != zlib.crc32(fields):
        return "the header's checksum is wrong"
    magic, found, group, key, nbytes, checksum = _FIELDS.unpack(fields)
    if magic != MAGIC or found != version:
        return "it is of another version"
    if (group, key) != (name.group, name.key):
        return "it is another page"
    if nbytes != page.nbytes:
        return f"it has {nbytes} bytes, not {page.nbytes}"
    if checksum != zlib.crc32(page):
        return "its checksum is wrong"
    return None


def claims(head: bytes) -> tuple[bytes, PageName, int] | None:
    """The version, name and length that a header speaks of; None if it is none."""
    if len(head) < HEADER_BYTES or _CRC.unpack_from(head, _FIELDS.size)[0] != zlib.crc32(head[:_FIELDS.size]):
        return None
    magic, version, group, key, nbytes, _ = _FIELDS.unpack_from(head)
    return (version, PageName(group, key), nbytes) if magic == MAGIC else None
