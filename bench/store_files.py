"""Pages as files beside pages in one large file: what writing and reading one takes, in the page cache.

    python bench/store_files.py [FOLDER]
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from pathlib import Path

SIZES = ((20_560, 2000), (262_224, 500), (2_097_232, 100))
"""Bytes of a page with its header, as of a tiny, a small and an 8B model; and how many."""


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as scratch:
        for size, count in SIZES:
            files, one = measure_files(Path(scratch) / f"files-{size}", size, count), measure_one(Path(scratch), size, count)
            print(f"{size:>9,} bytes: a file each, written in {files[0] * 1e6:7.1f} us, read in {files[1] * 1e6:7.1f} us; "
                  f"one large file {one[0] * 1e6:7.1f} and {one[1] * 1e6:7.1f}")


def measure_files(root: Path, size: int, count: int) -> tuple[float, float]:
    """Seconds a page to write and to read, as `stores/disk.py` does it."""
    data, into = random.randbytes(size), [memoryview(bytearray(size))]
    for i in range(256):
        (root / f"{i:02x}").mkdir(parents=True)
    paths = [str(root / f"{i % 256:02x}" / f"{i:064d}-0") for i in range(count)]
    start = time.perf_counter()
    for i, path in enumerate(paths):
        file = os.open(root / f"new-{i}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(file, data)
        os.close(file)
        os.rename(root / f"new-{i}", path)
    written = time.perf_counter()
    random.shuffle(paths)
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.readv(file, into)
        os.utime(file)
        os.close(file)
    return (written - start) / count, (time.perf_counter() - written) / count


def measure_one(root: Path, size: int, count: int) -> tuple[float, float]:
    """The same for one file that is appended to."""
    data, into = random.randbytes(size), [memoryview(bytearray(size))]
    file = os.open(root / f"one-{size}", os.O_RDWR | os.O_CREAT)
    start = time.perf_counter()
    for _ in range(count):
        os.write(file, data)
    written = time.perf_counter()
    for i in random.sample(range(count), count):
        os.preadv(file, into, i * size)
    end = time.perf_counter()
    os.close(file)
    return (written - start) / count, (end - written) / count


if __name__ == "__main__":
    main()
