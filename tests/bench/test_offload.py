"""bench/offload.py on a CPU: what is away is counted, and greedy tokens stay."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import offload


def test_tokens_stay_wherever_matrices_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "BATCHES", (1, 3))
    monkeypatch.setattr(sys, "argv", ["offload.py", "--shape", "tiny", "--device", "cpu", "--parts", "0,0.5d,1d",
                                      "--folder", str(tmp_path), "--output", str(tmp_path / "found.jsonl")])
    assert offload.main() == 0
    lines = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert [line["same_tokens"] for line in lines] == [offload.TOKENS, 3 * offload.TOKENS] * 3
    none, half, whole = (line["bytes_away"] for line in lines[::2])
    assert none == 0 < half and whole == 2 * half
    assert all(line["step_ms"] > 0 for line in lines)
