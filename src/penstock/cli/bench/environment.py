"""In what a figure was measured: machine, device, library versions, commit. A figure without it says little."""

import os
import platform
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import penstock

PACKAGES = ("torch", "triton", "numpy", "tokenizers", "safetensors", "uvloop", "starlette")


def environment() -> dict[str, Any]:
    """Facts about this machine and installation. Unknown facts are None; nothing raises, torch is not imported."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "penstock": penstock.__version__, "git_commit": _commit(),
            "python": platform.python_version(), "os": f"{platform.system()} {platform.release()}", "cpu": _cpu_name(),
            "cores": cores, "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "load_average": round(os.getloadavg()[0], 2), **_gpu(), "packages": {name: _version(name) for name in PACKAGES}}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpu() -> dict[str, Any]:
    """The GPUs, their driver, and their clocks now and at most in MHz, as nvidia-smi names them."""
    names = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem")
    answer = _say("nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits")
    rows = [row.split(", ") for row in (answer or "").splitlines() if row.count(", ") == len(names) - 1]
    return {"gpu": [row[0] for row in rows] or None, "driver": rows[0][1] if rows else None,
            "clocks": [dict(zip(("sm", "sm_most", "memory", "memory_most"),
                           (int(one) if one.isdigit() else None for one in row[2:]), strict=True))
                       for row in rows] or None}


def _commit() -> str | None:
    """The commit of the checkout that this package runs from, with a + if it has changes; None if it was installed."""
    root = Path(penstock.__file__).resolve().parents[2]
    commit = _say("git", "-C", str(root), "rev-parse", "--short=12", "HEAD") if (root / ".git").exists() else None
    changed = commit and _say("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+" if changed else commit


def _say(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


if __name__ == "__main__":
    sys.stdout.write(f"{environment()}\n")
