"""From exec to the first token, with an empty kernel cache and a filled one; and what is compiled after the engine was ready.

Each start is a process of its own (bench/gpu_start_child.py). After the first token it goes through lengths, batches and every
feature of sampling, and counts the kernels that were compiled, or taken from the cache on disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fixed import FIRST_TOKEN_TARGET, SHAPES, write
from penstock.core.errors import ConfigError

_LENGTH = 16384
_CHILD = Path(__file__).with_name("gpu_start_child.py")


def starts(shape: str, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """The shape's two starts: seconds since exec at which each stage was reached, and counts of kernels."""
    config = SHAPES[shape]
    with tempfile.TemporaryDirectory() as folder:
        model = write(config, Path(folder) / shape)
        for cache, target in FIRST_TOKEN_TARGET.items():
            found = start(model, Path(folder) / "cache", min(_LENGTH, config["max_position_embeddings"]))
            say(f"{shape}, {cache} cache: " + ", ".join(f"{mark} {at:.2f}" for mark, at in found["marks"].items())
                + f" s (target {target:g})")
            say(f"  compiled, loaded: at ready {found['at_ready']}, after a sweep {found['after']} {found['names']}")
            yield {"shape": shape, "cache": cache, "target": target, **found}


def start(model: Path, cache: Path, max_model_len: int) -> dict[str, Any]:
    """One start. ConfigError with what the process said last if it fails."""
    began = time.time()
    done = subprocess.run([sys.executable, str(_CHILD), str(model), str(max_model_len)],
                          capture_output=True, text=True, env=os.environ | {"TRITON_CACHE_DIR": str(cache)}, check=False)
    if done.returncode:
        raise ConfigError(f"the engine's process failed: {done.stderr[-2000:].strip()}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["marks"] = {name: round(at - began, 2) for name, at in found["marks"].items()}
    return found
