"""Which weights a folder holds, without reading all of them: for caches that outlive the process.

Every tensor's name, type and shape, and samples of its bytes, go into one hash. A model that was trained further differs in
about every byte of every tensor it touched, so a sample of each tensor tells, at the cost of a few reads a tensor.
"""

from __future__ import annotations

import json
import os
from hashlib import blake2b
from pathlib import Path
from typing import Any

from penstock.checkpoint.tensors import read_headers

_SAMPLES = 8
"""Of each tensor, evenly over it."""
_SAMPLE_BYTES = 64


def fingerprint(folder: Path, checkpoint: dict[str, Any], load_format: str, seed: int) -> str:
    """Hex digits that are equal for equal weights and configuration. Random weights are known by their seed."""
    found = blake2b(json.dumps(checkpoint, sort_keys=True, default=str).encode(), digest_size=16)
    if load_format == "dummy":
        found.update(b"dummy %d" % seed)
        return found.hexdigest()
    files: dict[Path, int] = {}
    try:
        for name, stored in sorted(read_headers(folder).items()):
            found.update(json.dumps([name, stored.dtype, stored.shape]).encode())
            file = files.get(stored.file)
            if file is None:
                file = files[stored.file] = os.open(stored.file, os.O_RDONLY)
            step = max(1, stored.nbytes // _SAMPLES)
            for start in range(stored.start, stored.end, step):
                found.update(os.pread(file, min(_SAMPLE_BYTES, stored.end - start), start))
    finally:
        for file in files.values():
            os.close(file)
    return found.hexdigest()
