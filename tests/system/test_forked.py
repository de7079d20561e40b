"""A forked server and its engine are what they would be by exec."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.system.served import served

KEPT = ("SigIgn", "SigBlk", "Cpus_allowed", "Groups", "Umask")
OWN = 1 << signal.SIGCHLD - 1
"""uvloop waits for processes by these."""


def facts(pid: int) -> dict[str, Any]:
    """The facts of a process that others see, its parent aside."""
    process = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    opened = [os.readlink(one) for one in (process / "fd").iterdir()]
    stat = (process / "stat").read_text().rpartition(")")[2].split()
    return {"line": (process / "cmdline").read_text().rstrip("\0"), "folder": os.readlink(process / "cwd"),
            "limits": (process / "limits").read_text(), "group and session": stat[2:4],
            # The number of threads in a pool depends on how calls met.
            "threads": {(one / "comm").read_text() for one in (process / "task").iterdir()},
            "open": {"pipe or socket" if name[:4] in ("pipe", "sock") else name for name in opened},
            "caught": int(status["SigCgt"], 16) & ~OWN,
            **{name: status[name] for name in KEPT}}


@pytest.mark.exhaustive
def test_a_fork_is_what_exec_starts() -> None:
    found: list[Any] = []
    drawn: set[str] = set()
    for fresh in (False, False, True):
        with served("canary", "--max-model-len", "256", fresh=fresh) as server:
            said = server.complete(prompt="The tallest", max_tokens=12, temperature=0, logprobs=2)["choices"]
            drawn.add(server.complete(prompt="The tallest", max_tokens=1)["id"])
            parents = [int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                       for pid in (server.process.pid, server.engine_pid)]
            assert parents == [os.getpid(), server.process.pid]
            found.append([said, facts(server.process.pid), facts(server.engine_pid)])
            engine = server.engine_pid
        assert server.process.returncode == 0 and not Path(f"/proc/{engine}").exists()
    forked, _, by_exec = found
    assert forked[0] == by_exec[0]
    # Two forks of one process draw random numbers of their own.
    assert len(drawn) == 3
    # The log's name differs, and how the server looks at its engine.
    for one in (*forked[1:], *by_exec[1:]):
        one["open"] = {name for name in one["open"] if not name.endswith(".log") and "[pidfd]" not in name}
    assert forked[1:] == by_exec[1:]
