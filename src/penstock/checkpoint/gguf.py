"""GGUF files: metadata and the places of tensors, every offset checked. `gguf_model.py` interprets names and keys.

Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian)."""

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST = 1 << 24
"""Elements of an array, characters of a string, tensors: more is damage."""

SIZES = {0: ("f32", 1, 4), 1: ("f16", 1, 2), 2: ("q4_0", 32, 18), 3: ("q4_1", 32, 20), 6: ("q5_0", 32, 22), 7: ("q5_1", 32, 24),
         8: ("q8_0", 32, 34), 10: ("q2_k", 256, 84), 11: ("q3_k", 256, 110), 12: ("q4_k", 256, 144), 13: ("q5_k", 256, 176),
         14: ("q6_k", 256, 210), 16: ("iq2_xxs", 256, 66), 17: ("iq2_xs", 256, 74), 18: ("iq3_xxs", 256, 98),
         19: ("iq1_s", 256, 50), 20: ("iq4_nl", 32, 18), 21: ("iq3_s", 256, 110), 22: ("iq2_s", 256, 82),
         23: ("iq4_xs", 256, 136), 29: ("iq1_m", 256, 56), 30: ("bf16", 1, 2), 34: ("tq1_0", 256, 54), 35: ("tq2_0", 256, 66),
         39: ("mxfp4", 32, 17), 40: ("nvfp4", 64, 36)}
"""Types by number: name, columns and bytes of a block."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: its shape with the rows first, the name of its type, and its bytes [start, end) in the file."""

    name: str
    shape: tuple[int, ...]
    kind: str
    start: int
    end: int


@dataclass(frozen=True)
class File:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Entry]


class _Cursor:
    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def count(self, what: str) -> int:
        found: int = self.take("Q")
        if found > min(_MOST, len(self.data)):
            raise ValueError(f"{what} would be {found} long")
        return found

    def text(self) -> str:
        length = self.count("a string")
        found = self.data[self.at:self.at + length]
        if len(found) < length:
            raise ValueError("a string reaches beyond its end")
        self.at += length
        return found.decode("utf-8", "surrogateescape")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY and depth < 2:
            inner, count = self.take("I"), self.count("an array")
            if inner not in _SCALARS:
                return [self.value(inner, depth + 1) for _ in range(count)]
            form = f"<{count}{_SCALARS[inner]}"
            found = list(struct.unpack_from(form, self.data, self.at))
            self.at += struct.calcsize(form)
            return found
        if kind not in _SCALARS:
            raise ValueError(f"a value has type {kind}, which is not defined")
        return self.take(_SCALARS[kind])


def read(path: Path) -> File:
    """One file. ModelError says what is wrong with it."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(path, _Cursor(data))
    except (struct.error, ValueError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not a whole GGUF file: {error}; download it again") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from None


def _read(path: Path, cursor: _Cursor) -> File:
    if cursor.data[:4] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    cursor.at = 4
    version = cursor.take("I")
    if version not in (2, 3):
        raise ValueError(f"its version is {version}; possible are 2 and 3, little-endian")
    tensors, keys = cursor.count("the list of tensors"), cursor.count("the metadata")
    metadata = {}
    for _ in range(keys):
        name = cursor.text()
        metadata[name] = cursor.value(cursor.take("I"))
    listed = []
    for _ in range(tensors):
        name = cursor.text()
        dims = cursor.take("I")
        if dims > 4:
            raise ValueError(f"tensor {name} has {dims} dimensions")
        shape = tuple(cursor.take("Q") for _ in range(dims))[::-1]
        listed.append((name, shape, cursor.take("I"), cursor.take("Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"its alignment is {alignment!r}")
    base = -(-cursor.at // alignment) * alignment
    found: dict[str, Entry] = {}
    for name, shape, number, offset in listed:
        if number not in SIZES:
            raise ModelError(f"{path}: tensor {name} has type {number}, which Penstock does not know; it knows "
                             f"{', '.join(kind for kind, _, _ in SIZES.values())}")
        kind, columns, nbytes = SIZES[number]
        if not shape or shape[-1] % columns:
            raise ValueError(f"tensor {name} {list(shape)} is not made of whole blocks of {kind}")
        start = base + offset
        end = start + math.prod(shape) // columns * nbytes
        if end > len(cursor.data):
            raise ValueError(f"tensor {name} ends at byte {end}, the file has {len(cursor.data)} (cut short)")
        found[name] = Entry(name, shape, kind, start, end)
    return File(path, metadata, found)


_SPLIT = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf")


def siblings(path: Path) -> list[Path]:
    """All files of a model that may be split, in order, given one of them. ModelError names those that are missing."""
    found = _SPLIT.fullmatch(path.name)
    if found is None:
        return [path]
    paths = [path.with_name(f"{found[1]}-{i:05}-of-{found[3]}.gguf") for i in range(1, int(found[3]) + 1)]
    missing = [one.name for one in paths if not one.is_file()]
    if missing:
        raise ModelError(f"{path.parent} lacks {', '.join(missing[:4])} of a model that is split into {int(found[3])} files; "
                         "download them")
    return paths
