"""Signals to either process at random moments: every client gets an end, nothing is left behind, nothing foreign is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile.kills import KINDS, play


@pytest.mark.parametrize("kind", KINDS)
def test_one_of_each(tmp_path: Path, kind: str) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    play(tmp_path / "cache", temporary, kind, 8, KINDS.index(kind))
    if kind == "frontend SIGKILL":
        # The next start finds the folder of the killed one, and removes it.
        play(tmp_path / "cache", temporary, "frontend SIGTERM", 2, 0)
        assert not list(temporary.glob("penstock-*"))


@pytest.mark.exhaustive
def test_fifty_kills(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    rounds = [play(tmp_path / "cache", temporary, KINDS[i % len(KINDS)], 64, 100 + i) for i in range(50)]
    print(f"\n50 signals under 64 streams: last end after {max(one.seconds for one in rounds):.1f} s at most, "
          f"ready after {sorted(one.restart for one in rounds)[len(rounds) // 2]:.1f} s (median)")
