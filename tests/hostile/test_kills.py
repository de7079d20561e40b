"""Signals to either process at random moments: every client gets an end, nothing is left behind, nothing foreign is touched."""

from __future__ import annotations

import contextlib
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.hostile.kills import KINDS, alive, descendants, play
from tests.sampling import sampled
from tests.system.served import served


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A temporary folder of the servers' own. pytest's have paths that are too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        yield Path(folder)


@pytest.mark.parametrize("kind", sampled(KINDS, 2, 1))
def test_one_of_each(tmp_path: Path, temporary: Path, kind: str) -> None:
    play(tmp_path / "cache", temporary, kind, 8, KINDS.index(kind))
    if kind == "frontend SIGKILL":
        # The next start finds the folder of the killed one, and removes it.
        play(tmp_path / "cache", temporary, "frontend SIGTERM", 2, 0)
        assert not list(temporary.glob("penstock-*"))


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_a_looping_template_does_not_outlive_the_server(how: str) -> None:
    """The model's own template loops: requests wait for its deadline, /health answers, signals work, nothing is left."""
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with served("canary", "--chat-template", loop, "--template-timeout", "60", "--shutdown-timeout", "1",
                fresh=True) as server:
        body = {"messages": [{"role": "user", "content": "a"}]}
        waiting = [threading.Thread(target=give_up, args=(server.url, body), daemon=True) for _ in range(4)]
        for thread in waiting:
            thread.start()
        time.sleep(1.5)
        assert server.http.get("/health").status_code == 200
        assert server.complete(prompt="a", max_tokens=2)
        processes = descendants(server.process.pid)
        server.signal(getattr(signal, how))
        assert server.ended(10) == (0 if how == "SIGTERM" else -9)
        until = time.monotonic() + 3
        while any(map(alive, processes)):
            assert time.monotonic() < until, "a rendering process is left"
            time.sleep(0.02)


def give_up(url: str, body: dict[str, Any]) -> None:
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)


@pytest.mark.exhaustive
def test_fifty_kills(tmp_path: Path, temporary: Path) -> None:
    rounds = [play(tmp_path / "cache", temporary, KINDS[i % len(KINDS)], 64, 100 + i) for i in range(50)]
    ready, computing = (sorted(getattr(one, name) for one in rounds) for name in ("restart", "computing"))
    print(f"\n50 signals under 64 streams: last end after {max(one.seconds for one in rounds):.1f} s at most; ready after "
          f"{ready[25]:.1f} s (median), {ready[-1]:.1f} s (most), of which both processes computed {computing[25]:.1f} and "
          f"{computing[-1]:.1f} s")
    assert computing[-1] < 5, computing
