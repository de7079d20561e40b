"""The identity of a folder's weights: a hash of all bytes of its files, for caches that outlive the process; a sample.

A file's SHA-256 is computed, at some 2 GB/s with a thread for each file, or taken from the hub's cache, where a weight file is
a link to a blob named by its hash. The server is ready before the hash is: callers that need it poll `Fingerprint.value`."""

import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from penstock.checkpoint.tensors import find, read_headers

LOG = logging.getLogger("penstock")

_PIECE_BYTES = 8 << 20
"""Read and hashed at a time; Python's lock is free meanwhile."""
_SAMPLES, _SAMPLE_BYTES = 8, 64
"""Of each tensor, evenly over it."""
_BLOB = re.compile(r"[0-9a-f]{64}")
_NICE = 10
"""Hashing threads give way to everything else."""


class Fingerprint:
    """The hash of a model's weights, computed in the background. Create it before the weights are loaded."""

    def __init__(self, folder: Path | None, load_format: str, seed: int) -> None:
        """Notes the files as they are now, of random weights (load_format "dummy") the seed. ModelError without weights."""
        self._known = f"dummy-{seed}" if load_format == "dummy" or folder is None else ""
        self._files = [] if self._known else find(folder or Path())
        self._before = [_facts(path) for path in self._files]
        self._hashes: list[Future[str]] = []
        self.failed = ""
        """Why the hash will never be known."""
        self._closed = False

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self._files if _named(path) is None)

    def start(self) -> None:
        """Begins to hash; call it when the weights are loaded, so that both do not compete for the disk."""
        for path in self._files:
            future: Future[str] = Future()
            self._hashes.append(future)
            if (named := _named(path)) is not None:
                future.set_result(named)
            else:
                threading.Thread(target=self._run, args=(path, future), name="penstock-hash", daemon=True).start()

    @property
    def value(self) -> str | None:
        """Hex digits that are equal only for equal weights; None while they are not known."""
        if not self._known and not self.failed and self._hashes and all(future.done() for future in self._hashes):
            self._finish()
        return self._known or None

    def close(self) -> None:
        self._closed = True

    def _finish(self) -> None:
        try:
            hashes = [future.result() for future in self._hashes]
            if [_facts(path) for path in self._files] != self._before:
                raise OSError("files of weights were changed while they were loaded")
            self._known = combine([path.name for path in self._files], hashes)
        except OSError as error:
            self.failed = str(error)
            LOG.warning("the weights cannot be identified (%s); nothing is stored on disk or remotely, nor told in KV events",
                        error)

    def _run(self, path: Path, future: Future[str]) -> None:
        # Of this thread alone, on Linux.
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            future.set_result(self._hash(path))
        except OSError as error:
            future.set_exception(error)

    def _hash(self, path: Path) -> str:
        hashed, piece = hashlib.sha256(), memoryview(bytearray(_PIECE_BYTES))
        with path.open("rb", buffering=0) as file:
            while got := file.readinto(piece):
                if self._closed:
                    raise OSError("the engine has been closed")
                hashed.update(piece[:got])
        return hashed.hexdigest()


def sample(folder: Path | None, load_format: str, seed: int) -> str:
    """A digest of every tensor's name, type, shape and a few bytes: quick, but equal for weights that differ in few values."""
    if load_format == "dummy" or folder is None:
        return f"dummy-{seed}"
    found, files = hashlib.sha256(), dict[Path, int]()
    try:
        for name, stored in sorted(read_headers(folder).items()):
            found.update(json.dumps([name, stored.dtype, stored.shape]).encode())
            if stored.file not in files:
                files[stored.file] = os.open(stored.file, os.O_RDONLY)
            for start in range(stored.start, stored.end, max(1, stored.nbytes // _SAMPLES)):
                found.update(os.pread(files[stored.file], min(_SAMPLE_BYTES, stored.end - start), start))
    finally:
        for file in files.values():
            os.close(file)
    return found.hexdigest()


def combine(names: Sequence[str], hashes: Sequence[str]) -> str:
    """One hash of files by their names and hashes."""
    found = hashlib.sha256()
    for name, digest in sorted(zip(names, hashes, strict=True)):
        found.update(f"{len(name)}:{name}:{digest}\n".encode())
    return found.hexdigest()


def _named(path: Path) -> str | None:
    """The SHA-256 by which the hub cache names the blob that a file links to; None if the file is no such link."""
    if not path.is_symlink():
        return None
    target = path.resolve()
    return target.name if target.parent.name == "blobs" and _BLOB.fullmatch(target.name) else None


def _facts(path: Path) -> tuple[int, int, int, int]:
    """Values that change if a file is written to or replaced. The change time cannot be set back by a user."""
    facts = path.stat()
    return facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns
