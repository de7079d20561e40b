"""CPU time of the server's frontend for a streamed token: many chat streams against canary, user and kernel time apart.

`python bench/streams.py --streams 64 --tokens 200 --rounds 3`. Each round asks for answers of `--tokens` and of four times as
many: the difference is the cost of tokens alone, the rest that of a request. The client reads raw bytes and parses nothing, so
that it disturbs little; the engine is a process of its own and is not counted. Prints one line of JSON for each round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def seconds_of(pid: int) -> tuple[float, float]:
    """(user, kernel) CPU seconds of a process so far, of its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return int(fields[11]) / TICKS, int(fields[12]) / TICKS


async def stream(port: int, tokens: int, number: int) -> int:
    """Reads one streamed answer; the number of its events."""
    body = json.dumps({"messages": [{"role": "user", "content": f"Repeat: dog cat {number}"}], "stream": True,
                       "max_tokens": tokens, "min_tokens": tokens, "temperature": 1, "seed": number}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
                 b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
    events = 0
    while piece := await reader.read(1 << 16):
        events += piece.count(b"data: {")
    writer.close()
    return events


async def measure(port: int, pid: int, streams: int, tokens: int) -> tuple[float, float]:
    """(user, kernel) seconds of a round of streams."""
    before = seconds_of(pid)
    events = sum(await asyncio.gather(*(stream(port, tokens, number) for number in range(streams))))
    assert events >= streams * tokens * 0.9, events
    user, kernel = (b - a for a, b in zip(before, seconds_of(pid), strict=True))
    return user, kernel


def compared(port: int, pid: int, streams: int, tokens: int) -> dict[str, float]:
    """Microseconds of user and kernel time for a token, and milliseconds for a request, from two lengths of answers."""
    few, many = (asyncio.run(measure(port, pid, streams, count)) for count in (tokens, 4 * tokens))
    user, kernel = ((b - a) / (3 * tokens * streams) for a, b in zip(few, many, strict=True))
    request = sum(few) / streams - (user + kernel) * tokens
    return {"user_us": round(1e6 * user, 1), "kernel_us": round(1e6 * kernel, 1), "us": round(1e6 * (user + kernel), 1),
            "request_ms": round(1e3 * request, 2), "load": round(os.getloadavg()[0], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    command = [sys.executable, "-m", "penstock", "serve", "canary", "--port", "0", "--max-model-len", "4096",
               "--max-num-seqs", str(args.streams)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        port = next(int(found[1]) for line in server.stdout if (found := re.search(r"ready at http://\S+:(\d+)", line)))
        asyncio.run(measure(port, server.pid, args.streams, 20))
        for _ in range(args.rounds):
            print(json.dumps(compared(port, server.pid, args.streams, args.tokens)), flush=True)
    finally:
        server.terminate()
        server.wait(20)


if __name__ == "__main__":
    main()
