"""Serial tests run alone, whatever the other workers do."""

from __future__ import annotations

import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

HERE = Path(__file__).resolve()
TESTS = """
import pathlib, time, pytest

def stay(name):
    with open({log!r}, "a") as log:
        log.write(name + " begins\\n"); log.flush(); time.sleep(0.05); log.write(name + " ends\\n")

@pytest.mark.parametrize("number", range(8))
def test_common(number): stay(f"common {file}")

@pytest.mark.serial
def test_alone(): stay("alone {file}")

@pytest.mark.parametrize("number", range(8))
def test_more(number): stay(f"more {file}")
"""


@pytest.mark.exhaustive
def test_serial_tests_run_alone(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    shutil.copy(HERE.parents[1] / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = serial: alone\n")
    log = tmp_path / "log"
    for file in range(2):
        (tmp_path / f"test_{file}.py").write_text(TESTS.format(log=str(log), file=file))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout
    lines = log.read_text().splitlines()
    places = [place for place, line in enumerate(lines) if line.startswith("alone") and line.endswith("begins")]
    assert len(lines) == 68 and len(places) == 2
    assert all(lines[place + 1] == lines[place].replace("begins", "ends") for place in places), lines
    assert any(line.endswith("begins") and after.endswith("begins") for line, after in pairwise(lines))
