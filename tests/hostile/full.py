"""`make hostile`: every hostile case at full size for ten minutes, beside a well-behaved client whose latency is measured.

First the client alone, then with the attackers (a process of their own), then beside as many harmless requests, then beside
attackers of another, trivial server (a control: what they take of this machine's processors), then alone.
Printed: its p50 and p99, /health's, the memory of both processes, answers by status. Exit status 1 if a bound is broken.
Everything goes to the loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import re
import socket
import statistics
import sys
import time
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import grpc
import httpx

from tests.hostile.bodies import cases
from tests.hostile.calls import METHODS, calls
from tests.hostile.forms import forms
from tests.hostile.test_bodies import KNOWN
from tests.system.served import Served, served

SECONDS = float(os.environ.get("HOSTILE_SECONDS", "600"))
ALONE = max(10.0, SECONDS / 10)
"""How long the client runs alone, before and after."""

LATENCY_RISE, HEALTH_RISE, MEMORY_RISE = 0.10, 0.050, 0.05

POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"


PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
JUNK = (b'"', b"{", b"[", b"9" * 20, b"\\", b"null", b"\xff", b"-", b"e99")


Phase = tuple[list[float], list[float]]
"""Seconds of a client's requests, and of /health."""


class Behaved:
    """A client that sends a short chat request again and again, and asks /health beside it."""

    def __init__(self, server: Served) -> None:
        self.server = server
        self.latencies: list[float] = []
        self.health: list[float] = []
        self.failures: Counter[str] = Counter()

    async def run(self, seconds: float) -> Phase:
        """(latencies, /health's) of a while."""
        self.latencies, self.health = [], []
        until = time.monotonic() + seconds
        async with httpx.AsyncClient(base_url=self.server.url, timeout=60) as client:
            await asyncio.gather(self._chat(client, until), self._health(client, until))
        return self.latencies, self.health

    async def _chat(self, client: httpx.AsyncClient, until: float) -> None:
        body = {"messages": [{"role": "user", "content": "Hello, who are you?"}], "max_completion_tokens": 8, "temperature": 0}
        while time.monotonic() < until:
            began = time.perf_counter()
            answer = await client.post("/v1/chat/completions", json=body)
            self.latencies.append(time.perf_counter() - began)
            if answer.status_code != 200:
                self.failures[f"{answer.status_code} {answer.text[:80]}"] += 1
            await asyncio.sleep(0.02)

    async def _health(self, client: httpx.AsyncClient, until: float) -> None:
        while time.monotonic() < until:
            began = time.perf_counter()
            answer = await client.get("/health")
            self.health.append(time.perf_counter() - began)
            if answer.status_code != 200:
                self.failures[f"/health {answer.status_code}"] += 1
            await asyncio.sleep(0.02)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


# -- the attackers, in a process of their own


def ordinary(url: str, rate: float, until: float, found: Any) -> None:
    """As many requests a second as the attackers had sent, but harmless ones: what the load costs that is no attack."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    statuses: Counter[str] = Counter()

    async def run() -> None:
        body = json.dumps({"prompt": "Once", "max_tokens": 3, "temperature": 0}).encode()
        async with httpx.AsyncClient(base_url=url, timeout=60) as client, asyncio.TaskGroup() as group:
            while time.monotonic() < until:
                group.create_task(_send(client, "/v1/completions", body, statuses, "ordinary"))
                await asyncio.sleep(1 / rate)

    asyncio.run(run())
    found.put(dict(statuses))


def attack(url: str, grpc_address: str, document: dict[str, Any], until: float, found: Any) -> None:
    """All attackers at once until `until` (time.monotonic()); puts the counts of statuses into `found`. They take only
    processor time that nobody else wants: they stand for other machines, whose own work is no load of the server's."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    statuses: Counter[str] = Counter()
    asyncio.run(_attack(url, grpc_address, document, until, statuses))
    found.put(dict(statuses))


def trivial(port: Any) -> None:
    """A server that answers every request at once, at the attackers' priority; puts its port into the queue."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = re.search(rb"(?i)content-length: (\d+)", head)
                await reader.readexactly(int(length[1]) if length else 0)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
                await writer.drain()
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


async def _attack(url: str, grpc_address: str, document: dict[str, Any], until: float, statuses: Counter[str]) -> None:
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(until - time.monotonic() + 10):
                await asyncio.gather(
                    _generated(client, document, until, statuses), _known(client, until, statuses),
                    _hang_up(client, until, statuses), _fuzz(client, until, statuses), _cancel(client, until, statuses),
                    _connections(url, until, statuses), _calls(grpc_address, until, statuses))


async def _send(client: httpx.AsyncClient, path: str, body: bytes, statuses: Counter[str], name: str,
                kind: str = "application/json") -> None:
    began = time.monotonic()
    try:
        answer = await client.post(path, content=body, headers=[(b"content-type", kind.encode("latin-1"))])
    except httpx.HTTPError as error:
        statuses[type(error).__name__] += 1
        return
    finally:
        if time.monotonic() - began > 10:
            statuses[f"slow: {name}"] += 1
    statuses[str(answer.status_code)] += 1
    if answer.status_code >= 500 and answer.status_code != 503:
        statuses[f"{answer.status_code} {name}: {answer.text[:120]}"] += 1


async def _generated(client: httpx.AsyncClient, document: dict[str, Any], until: float, statuses: Counter[str]) -> None:
    while time.monotonic() < until:
        for case in chain(cases(document), forms(20)):
            await _send(client, case.path, case.body, statuses, case.name, case.kind)
            await asyncio.sleep(0.05)
            if time.monotonic() > until:
                return


async def _each_once(url: str, document: dict[str, Any]) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        for case in chain(cases(document, most_bytes=1 << 20), forms()):
            await _send(client, case.path, case.body, Counter(), case.name, case.kind)


async def _known(client: httpx.AsyncClient, until: float, statuses: Counter[str]) -> None:
    bodies = [(path, json.dumps(body).encode(), name) for name, (path, body, _) in KNOWN.items()]
    while time.monotonic() < until:
        for path, body, name in bodies:
            await _send(client, path, body, statuses, name)
        await asyncio.sleep(0.2)


async def _hang_up(client: httpx.AsyncClient, until: float, statuses: Counter[str]) -> None:
    body = json.dumps({"prompt": "many words " * 90_000, "return_token_strs": True}).encode()

    async def one() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                await _send(client, "/tokenize", body, statuses, "hang up")

    while time.monotonic() < until:
        await asyncio.gather(*(one() for _ in range(20)))
        statuses["hung up"] += 20
        await asyncio.sleep(5)


async def _fuzz(client: httpx.AsyncClient, until: float, statuses: Counter[str]) -> None:
    rng = random.Random(1)
    good = [json.dumps({"prompt": "Once", "max_tokens": 3, "n": 2, "stop": ["a"]}).encode(),
            json.dumps({"messages": [{"role": "user", "content": "Once"}], "max_tokens": 3, "tools": []}).encode()]
    while time.monotonic() < until:
        body = bytearray(rng.choice(good))
        for _ in range(rng.randrange(1, 5)):
            place = rng.randrange(len(body))
            body[place:place + rng.randrange(3)] = rng.choice(JUNK)
        await _send(client, rng.choice(PATHS), bytes(body), statuses, "fuzz")
        await asyncio.sleep(0.01)


async def _cancel(client: httpx.AsyncClient, until: float, statuses: Counter[str]) -> None:
    rng = random.Random(2)
    while time.monotonic() < until:
        body = {"prompt": [1, 5, 9], "max_tokens": rng.randrange(2, 50), "stream": rng.random() < 0.5, "n": rng.choice((1, 2))}
        with contextlib.suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(rng.random() * 0.1):
                await client.post("/v1/completions", json=body)
        statuses["cancelled"] += 1
        await asyncio.sleep(0.02)


async def _connections(url: str, until: float, statuses: Counter[str]) -> None:
    """Idle connections, half heads, half bodies, endless headers, in turn."""
    host, port = url.removeprefix("http://").split(":")
    kinds = (b"", POST + b"a: b", POST + b"Content-Length: 1000000\r\n\r\n" + b"[" * 65536,
             POST + b"a: " + b"b" * 1_000_000, POST + b"a: b\r\n" * 50_000)
    while time.monotonic() < until:
        for kind in kinds:
            held = []
            for _ in range(300):
                with contextlib.suppress(OSError):
                    connection = socket.create_connection((host, int(port)), timeout=2)
                    connection.setblocking(False)
                    with contextlib.suppress(OSError):
                        connection.send(kind)
                    held.append(connection)
                await asyncio.sleep(0)
            statuses["connections"] += len(held)
            await asyncio.sleep(3)
            for connection in held:
                connection.close()
            if time.monotonic() > until:
                return


async def _calls(address: str, until: float, statuses: Counter[str]) -> None:
    """Hostile messages, one after another."""
    if not address:
        return
    async with grpc.aio.insecure_channel(address) as channel:
        while time.monotonic() < until:
            for call in calls():
                try:
                    if METHODS[call.method]:
                        async for _ in channel.stream_stream(call.path)(iter([call.data]), timeout=60):
                            pass
                    else:
                        await channel.unary_unary(call.path)(call.data, timeout=60)
                    code = "OK"
                except grpc.aio.AioRpcError as error:
                    code = error.code().name
                statuses[f"gRPC {code}"] += 1
                if code in ("INTERNAL", "UNKNOWN"):
                    statuses[f"500 gRPC {call.method} {call.name}"] += 1
                await asyncio.sleep(0.05)
                if time.monotonic() > until:
                    return


# -- the whole


def resident(server: Served) -> tuple[int, int]:
    """Bytes of memory of the frontend and of the engine."""
    pids = (server.process.pid, server.engine_pid)
    first, second = (int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in pids)
    return first, second


def main() -> int:
    with served("canary", "--max-num-seqs", "32", "--kv-cache-memory-bytes", "32M", "--grpc-port", "0", fresh=True) as server:
        grpc_address = re.findall(r"gRPC at ([0-9.]+:[0-9]+)", server.log)[0]
        document = server.http.get("/openapi.json").json()
        client = Behaved(server)
        # Caches that fill once, libraries that load once, and memory that allocators keep, are no growth: first every generated
        # body that is not large once, then a short attack.
        asyncio.run(_each_once(server.url, document))
        warm = min(60.0, SECONDS / 2)
        queue, process = start(attack, server.url, grpc_address, document, time.monotonic() + warm)
        time.sleep(warm)
        finish(queue, process, server)
        time.sleep(2)
        before = resident(server)
        alone = asyncio.run(client.run(ALONE))
        queue, process = start(attack, server.url, grpc_address, document, time.monotonic() + SECONDS)
        during = asyncio.run(client.run(SECONDS))
        statuses = finish(queue, process, server)
        sent = sum(count for name, count in statuses.items() if name in ("200", "400", "404", "413", "cancelled", "hung up"))
        queue, process = start(ordinary, server.url, sent / SECONDS, time.monotonic() + ALONE)
        loaded = asyncio.run(client.run(ALONE))
        finish(queue, process, server)
        port, other = start(trivial)
        queue, process = start(attack, f"http://127.0.0.1:{port.get(timeout=60)}", "", document, time.monotonic() + ALONE)
        beside = asyncio.run(client.run(ALONE))
        finish(queue, process, server)
        other.kill()
        time.sleep(3)
        asyncio.run(client.run(ALONE / 2))
        after = resident(server)
        phases = {"alone": alone, "attacked": during, "as many harmless": loaded, "attackers elsewhere": beside}
        return report(phases, statuses, before, after, client.failures, server)


def start(work: Any, *how: Any) -> tuple[Any, Any]:
    """A queue, and a process that does `work`."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(*how, queue))
    process.start()
    return queue, process


def finish(queue: Any, process: Any, server: Served) -> dict[str, int]:
    statuses: dict[str, int] = queue.get(timeout=150)
    process.join(30)
    server.settle(60)
    return statuses


def report(phases: dict[str, Phase], statuses: dict[str, int], before: tuple[int, int], after: tuple[int, int],
           failures: Counter[str], server: Served) -> int:
    """Prints the figures; 1 if a bound is broken."""
    broken = []
    for place, name in enumerate(("latency", "/health")):
        for phase, seconds in phases.items():
            values = seconds[place]
            middle, late = (1e3 * percentile(values, share) for share in (0.5, 0.99))
            print(f"{name:8} {phase:19} p50 {middle:7.1f} ms  p99 {late:7.1f} ms  "
                  f"max {max(values) * 1e3:7.1f} ms  mean {statistics.mean(values) * 1e3:7.1f} ms of {len(values)}")
        quiet, loud = (percentile(phases[phase][place], 0.99) for phase in ("alone", "attacked"))
        if loud - quiet > (LATENCY_RISE * quiet if name == "latency" else HEALTH_RISE):
            broken.append(f"p99 of {name} rose by {(loud - quiet) * 1e3:.0f} ms")
    for name, old, new in zip(("frontend", "engine"), before, after, strict=True):
        print(f"{name:8}  {old / 2**20:.0f} MiB before, {new / 2**20:.0f} MiB after ({(new - old) / old:+.1%})")
        if new > old * (1 + MEMORY_RISE):
            broken.append(f"memory of the {name} grew by {(new - old) / old:.1%}")
    print("attackers ", ", ".join(f"{name}: {count}" for name, count in sorted(statuses.items())))
    broken += [f"a 5xx: {name}" for name in statuses if name.startswith("50") and name[:3] != "503" and len(name) > 3]
    broken += [f"the well-behaved client saw {what} {count} times" for what, count in failures.items()]
    if server.process.poll() is not None or "Traceback" in server.log:
        broken.append("the server ended or printed a traceback")
    print("broken: " + "; ".join(broken) if broken else "every bound is kept")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
