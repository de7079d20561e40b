"""Do the tests notice faults? Puts each fault of `mutants.toml` into a copy of the source and runs the tests that must fail.

usage: python tests/mutants.py [NAME ...]          only mutants whose name contains one of these words

A mutant is found if one of its tests fails. The run fails if a mutant is not found, if its place in the
source is no longer there, or if its tests fail without it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".toml")
SECONDS = 300
"""A mutant may also make its tests run for ever, which counts as found."""


@dataclass(frozen=True)
class Mutant:
    """One fault: `old` occurs once in `file` (below src/penstock) and becomes `new`; one of `tests` must then fail."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]

    def applied(self, text: str) -> str:
        """The source with the fault. ValueError if its place is not there exactly once."""
        if text.count(self.old) != 1:
            raise ValueError(f"its place occurs {text.count(self.old)} times in {self.file}")
        return text.replace(self.old, self.new)


def table() -> list[Mutant]:
    """All mutants."""
    return [Mutant(**entry) for entry in tomllib.loads(TABLE.read_text())["mutant"]]


def verdict(mutant: Mutant, source: Path) -> str:
    """Empty if the mutant in `source`, a copy of src/, is found; else what is wrong."""
    path = source / "penstock" / mutant.file
    text = path.read_text()
    try:
        path.write_text(mutant.applied(text))
        status, said = run(mutant.tests, source, SECONDS)
    except ValueError as error:
        return str(error)
    finally:
        path.write_text(text)
    if status == 1:
        return ""
    return "no test found it" if status == 0 else f"its tests could not run:\n{said}"


def run(tests: list[str], source: Path, seconds: float | None = None) -> tuple[int, str]:
    """pytest's exit status with the package in `source`, and the end of what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return 1, "it took too long"
    return done.returncode, done.stdout[-2000:] + done.stderr[-2000:]


def main() -> int:
    wanted = [mutant for mutant in table() if not sys.argv[1:] or any(word in mutant.name for word in sys.argv[1:])]
    lost = []
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "src"
        shutil.copytree(ROOT / "src" / "penstock", source / "penstock", ignore=shutil.ignore_patterns("__pycache__"))
        status, said = run(sorted({test for mutant in wanted for test in mutant.tests}), source)
        if status:
            print(f"without any fault the tests fail:\n{said}")
            return 1
        for mutant in wanted:
            began = time.monotonic()
            problem = verdict(mutant, source)
            print(f"{'LOST ' if problem else 'found'} {time.monotonic() - began:5.1f} s  {mutant.name}"
                  f"{problem and ': ' + problem}", flush=True)
            lost += [mutant.name] if problem else []
    print(f"{len(wanted) - len(lost)} of {len(wanted)} faults are found")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
