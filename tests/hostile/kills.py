"""Signals to either process of a server at a random moment under streams, with a disk tier: what must hold afterwards.

Every client gets an end, no process is left, no temporary folder outlives the next start, no file of others is touched, and the
server starts again quickly.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path
from typing import NamedTuple

import httpx

from tests.system.served import Served

KINDS = ("frontend SIGKILL", "engine SIGKILL", "frontend SIGTERM", "engine SIGSTOP", "engine SIGTERM", "frontend SIGSTOP")

STALL = 4.0
"""--stall-timeout of the servers, in seconds."""

END_SECONDS = 60.0
"""The longest that a client waits for its end after the signal: some signals end nothing, and the streams run to their end."""


class Round(NamedTuple):
    """Observations of one round."""

    kind: str
    status: int
    """The frontend's exit status."""
    seconds: float
    """From the signal to the last client's end."""
    restart: float
    """Seconds from the start of the server to its readiness."""
    computing: float
    """Seconds of the processor that both processes took until then: `restart` on a machine that does nothing else is no
    longer."""


def bystanders(root: Path) -> dict[str, bytes]:
    """Files of others in and beside the cache's folder, by path."""
    for name in ("a/b/c/file", "incoming/upload.part", "models/model.safetensors", "0" * 32 + "/ab/page"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_bytes(name.encode() * 100)
            os.utime(path, (1e9, 1e9))
    return contents(root)


def contents(root: Path) -> dict[str, bytes]:
    """All files that are not the cache's."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*"))
            if path.is_file() and "penstock-cache" not in path.relative_to(root).parts}


def start(root: Path, temporary: Path) -> tuple[Served, float, float]:
    """A server of canary with a disk tier, how long it took to be ready, and the processor's part of it."""
    began = time.monotonic()
    server = Served("canary", "--cache-disk", str(root), "--cache-disk-adopt", "--cache-host-bytes", "16M",
                    "--kv-cache-memory-bytes", "16M", "--stall-timeout", str(STALL), "--shutdown-timeout", "3",
                    environment={"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}, fresh=True)
    seconds = time.monotonic() - began
    return server, seconds, sum(map(computed, (server.process.pid, *descendants(server.process.pid))))


def computed(pid: int) -> float:
    """Seconds of the processor that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> set[int]:
    """All processes under a process."""
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        children = {int(child) for task in tasks for child in (task / "children").read_text().split()}
    except OSError:
        return set()
    return children.union(*map(descendants, children))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def stream(client: httpx.AsyncClient, rng: random.Random) -> str:
    """One streaming request; how it ended."""
    prompt = "A story about " + " and ".join(rng.choice(("a fox", "the sea", "two friends", "rain")) for _ in range(9))
    body = {"prompt": prompt, "max_tokens": rng.randrange(100, 400), "stream": True, "ignore_eos": True}
    last = ""
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                last = line or last
    except httpx.HTTPError as error:
        return type(error).__name__
    return "done" if last == "data: [DONE]" else f"cut after {last[:60]!r}"


def play(root: Path, temporary: Path, kind: str, streams: int, seed: int) -> Round:
    """One round. AssertionError if something does not hold."""
    rng, before = random.Random(seed), bystanders(root)
    server, seconds, computing = start(root, temporary)
    try:
        folders = list(temporary.glob("penstock-*"))
        assert all(folder.name.startswith(f"penstock-{server.process.pid}-") for folder in folders), folders
        processes = descendants(server.process.pid)
        who, name = kind.split()
        pid = server.process.pid if who == "frontend" else server.engine_pid

        async def run() -> float:
            limits = httpx.Limits(max_connections=streams)
            async with httpx.AsyncClient(base_url=server.url, timeout=END_SECONDS + 10, limits=limits) as client:
                tasks = [asyncio.create_task(stream(client, rng)) for _ in range(streams)]
                await asyncio.sleep(rng.random() * 1.5)
                began = time.monotonic()
                os.kill(pid, getattr(signal, name))
                if kind == "frontend SIGSTOP":
                    await asyncio.sleep(2 * STALL)
                    os.kill(pid, signal.SIGCONT)
                elif name == "SIGSTOP":
                    await asyncio.sleep(1.5 * STALL)
                    assert (await client.get("/health", timeout=5)).status_code == 503
                    refused = await client.post("/v1/completions", json={"prompt": "a"}, timeout=5)
                    assert refused.status_code == 503, refused.text
                ended = await asyncio.wait_for(asyncio.gather(*tasks), END_SECONDS)
                assert len(ended) == streams
                return time.monotonic() - began

        took = asyncio.run(run())
        processes |= descendants(server.process.pid)
        if kind in ("engine SIGTERM", "frontend SIGSTOP"):
            # Neither ends anything: the parent decides about the child, and a process that goes on goes on.
            assert server.http.get("/health").status_code == 200, server.log
        if kind in ("engine SIGTERM", "frontend SIGSTOP", "engine SIGSTOP"):
            server.signal()
        status = server.ended(10)
        wanted = {"frontend SIGKILL": -9, "engine SIGKILL": 1, "engine SIGSTOP": 1}.get(kind, 0)
        assert status == wanted, (kind, status, server.log)
        until = time.monotonic() + 5
        while any(map(alive, processes)):
            assert time.monotonic() < until, f"left behind: {[pid for pid in processes if alive(pid)]}"
            time.sleep(0.02)
        left = list(temporary.glob("penstock-*"))
        assert not left or kind == "frontend SIGKILL", left
    finally:
        server.stop()
    assert contents(root) == before, "files of others have changed"
    return Round(kind, status, took, seconds, computing)
