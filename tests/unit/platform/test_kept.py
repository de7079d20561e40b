"""A start finds what an earlier one has kept, and only if all that it depends on is the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.platform import kept
from penstock.platform.kept import Kept


def test_found_again_under_the_same_only(tmp_path: Path) -> None:
    Kept(tmp_path / "a", "model", 4).write([1, 2, 3])
    assert Kept(tmp_path / "a", "model", 4).read() == [1, 2, 3]
    for folder, what in (("a", ("model", 5)), ("a", ("model",)), ("b", ("model", 4))):
        assert Kept(tmp_path / folder, *what).read() is None


def test_other_sources_are_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Kept(tmp_path, "model").write({"a": 1})
    monkeypatch.setattr(kept, "sources", lambda: b"other sources")
    assert Kept(tmp_path, "model").read() is None


def test_what_is_broken_or_cannot_be_written_is_not_there(tmp_path: Path) -> None:
    Kept(tmp_path, "model").write(7)
    next(tmp_path.iterdir()).write_text("{")
    assert Kept(tmp_path, "model").read() is None
    (tmp_path / "file").write_text("")
    Kept(tmp_path / "file", "model").write(7)
    assert Kept(tmp_path / "file", "model").read() is None
