"""bench/experts_held.py: what is counted of a step, and what is made of it, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import experts_held
from experts_held import Counted, Held, counted, drawn


def test_what_a_step_does() -> None:
    """Of six picks, two have a slot, one is the CPU's, one is nobody's; an expert that is picked twice is copied once."""
    slot = [0, -1, 1, -1, -1]
    assert counted([0, 1, 1, 2, 3, 4], [0, 1, 1, 2, -1, 4], slot) == Counted(6, 2, 1, 2)
    assert counted([0, 2], [0, 2], slot) == Counted(2, 2, 0, 0)
    with pytest.raises(ValueError, match="zip"):
        counted([0, 2], [0], slot)


def test_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of experts of 1,000 bytes; 8 sequences make 4,000 tokens a second, so that a step takes 2 ms."""
    rates = iter([1.0, 3000.0, 5000.0])
    steps = [Counted(16, 4, 2, 5), Counted(16, 8, 0, 7)]
    held: Any = Held.__new__(Held)
    stacks = [SimpleNamespace(host=torch.zeros(3, size, dtype=torch.uint8)) for size in (600, 400)]
    held.layers = [SimpleNamespace(stacks=stacks)] * 2
    monkeypatch.setattr(experts_held.Held, "run", lambda *_: next(rates))
    monkeypatch.setattr(experts_held.Held, "steps", lambda *_: iter(steps))
    line = held.measured(8, link=24e6)
    assert line["tokens_s"] == pytest.approx(4000) and line["all"] == [3000.0, 5000.0] and line["step_ms"] == pytest.approx(2.0)
    assert line["hit_rate"] == 12 / 32 and line["cpu_picks"] == 2 / 32 and line["fetched_a_layer"] == 6
    assert line["pcie_gb_s"] == pytest.approx(6 * 2 * 1000 / 2e-3 / 1e9) and line["pcie_share"] == pytest.approx(0.25)


def test_the_curve_is_drawn() -> None:
    """Two parts of the experts, with the CPU and without, and all: three panels, with a line for each number of sequences."""
    held = [{"held": held, "cpu": cpu, "sequences": batch, "tokens_s": 100.0 * batch * held, "hit_rate": held / 8,
             "pcie_share": 0.5} for held in (2, 4) for cpu in (True, False) for batch in (1, 8)]
    whole = [{"held": 8, "cpu": False, "sequences": batch, "tokens_s": 1600.0 * batch} for batch in (1, 8)]
    found = drawn(held + whole)
    assert found.count("<polyline") == 3 * 2 * 2 and "hit rate" in found and "8, by fetching alone" in found
