"""bench/cards.py: the sitting on several GPUs, rehearsed between processes on this machine's CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cards
import layouts
from fixed import workloads

BENCH = Path(cards.__file__).parent


@pytest.mark.parametrize("count", [4, 8])
def test_parts_are_there_for_every_number_of_cards(count: int) -> None:
    kinds = [kind for kind, _ in cards.parts(count, False)]
    assert kinds[0] == "time" and {"time", "equal", "served", "fault"} == set(kinds)
    assert {f"{axis}{count}" for axis in ("tp", "ep", "cp", "dp", "dpep", "dpepb")} <= layouts.LAYOUTS.keys()
    assert len(cards._products(count)) >= 2


def test_figures_beside_what_was_predicted() -> None:
    line = {"shape": "llama70b", "layout": "tp4", "workload": "decode_b1", "seconds": 1.0}
    found = cards.foretold(line)["predicted"]
    assert 2.0 < found < 4.0 and found < cards.foretold(line | {"layout": "tp2"})["predicted"]
    assert cards.foretold(line | {"layout": "cp4"}) == cards.foretold(line | {"workload": "prompt_120k"}) == {}


def test_the_simulator_is_near_what_two_cards_measured() -> None:
    """8B on two H200s of one host (bench/notes.md, 2026-11-23), whole workloads in seconds."""
    for workload, measured in (("decode_b1", 0.664), ("decode_b32", 0.626), ("decode_b256", 2.701), ("prefill_16x2k", 0.449)):
        asks = dict(workloads("llama8b"))[workload]
        assert 0.7 < layouts.simulated(layouts.cost("llama8b", "tp2"), asks) / measured < 1.1, workload


def test_more_sequences_on_more_cards() -> None:
    one = {"shape": "qwen30b_a3b", "layout": "one", "workload": "decode_b256", "seconds": 4.0}
    assert "of_linear" not in cards.foretold(one)
    assert cards.foretold(one | {"layout": "dpepb4", "workload": "decode_b1024", "seconds": 5.0}) == {"of_linear": 0.8}


@pytest.mark.serial
@pytest.mark.parametrize(("only", "most", "lines"), [
    (("fault",), 1, 1), pytest.param(("time", "equal", "served", "fault"), 99, 24, marks=pytest.mark.exhaustive)],
    ids=["fault", "all"])
def test_a_rehearsal(only: tuple[str, ...], most: int, lines: int, tmp_path: Path) -> None:
    """Every part ends with its figures, and they are on disk."""
    done = subprocess.run([sys.executable, str(BENCH / "cards.py"), "2", "--rehearse", "--most", str(most), "--only", *only],
                          env=os.environ | {"OUT": str(tmp_path), "PYTHONPATH": f"{BENCH}:{os.environ.get('PYTHONPATH', '')}"},
                          capture_output=True, text=True, timeout=390, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in (tmp_path / "layouts.jsonl").read_text().splitlines()]
    assert not [line for line in found if "failed" in line or line.get("equal") is False], (found, done.stderr[-3000:])
    assert len(found) == lines, found
    fault = next(line for line in found if "killed" in line)
    assert 200 not in fault["statuses"] and 0 not in fault["statuses"] and fault["all_ended_s"] < 10 and fault["again_s"] < 60
