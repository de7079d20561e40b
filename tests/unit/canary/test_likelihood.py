"""Intervals and comparisons worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from penstock.canary.likelihood import Interval, Record, compare, score


def test_an_interval_by_hand() -> None:
    """Mean 2, standard deviation 1, three values: 1.96 / sqrt(3)."""
    found = score([1.0, None, 2.0, 3.0])
    assert (found.mean, found.count) == (2.0, 3)
    assert (found.low, found.high) == pytest.approx((2 - 1.959964 / math.sqrt(3), 2 + 1.959964 / math.sqrt(3)))
    assert Interval.of([1.0]).low == -math.inf


def test_changes_are_measured_by_those_of_rounding() -> None:
    """Each item changes three times as much as rounding changes it, in turns up and down: the mean change says nothing, the
    ratio everything."""
    exact = [-float(place + 1) for place in range(40)]
    noise = [(-1) ** place * 0.01 * (place + 1) for place in range(40)]
    record = Record({"a": exact}, {"bfloat16": {"a": [value + change for value, change in zip(exact, noise, strict=True)]}})
    found = compare({"a": [value - 3 * change for value, change in zip(exact, noise, strict=True)]}, record)
    assert found.differs and found.ratio.mean == pytest.approx(3, rel=1e-3) and found.change.low < 0 < found.change.high
    same = compare({"a": [value - change for value, change in zip(exact, noise, strict=True)]}, record)
    assert not same.differs and same.ratio.mean == pytest.approx(1, rel=1e-3)


def test_only_what_both_have_counts(tmp_path: Path) -> None:
    record = Record({"a": [-1.0, None, -3.0], "b": [-1.0]}, {"bfloat16": {"a": [-1.1, None, -3.2], "b": [-1.0]}})
    record.dump(tmp_path / "r.json")
    assert Record.load(tmp_path / "r.json") == record
    assert compare({"a": [-1.5, -2.0, None], "c": [-1.0]}, record).ratio.count == 1
    (tmp_path / "r.json").write_text("[]")
    with pytest.raises(ValueError, match="no exact and rounded"):
        Record.load(tmp_path / "r.json")


def test_a_fault_of_one_skill_shows_and_each_dtype_has_its_own_noise() -> None:
    exact = {name: [-float(place + 1) for place in range(40)] for name in "abcdefgh"}
    noise = {dtype: {name: [value + size for value in values] for name, values in exact.items()}
             for dtype, size in (("bfloat16", 0.1), ("float32", 0.0001))}
    record = Record(exact, noise)
    values = {name: [value + (0.01 if name == "c" else 0.00005) * (1 + place % 3) for place, value in enumerate(found)]
              for name, found in exact.items()}
    assert not compare(values, record, "bfloat16").differs and not compare(values, record).differs
    found = compare(values, record, "float32")
    assert found.differs and found.differing == ["c"]
