"""One sitting on several GPUs of one host: everything that is wanted of four or eight cards, the most valuable first.

usage: python bench/cards.py 4 [--seconds 1500] [--only time served] [--rehearse]

Speed of 70B, 8B and 30B-A3B, equality with one card, replicas over HTTP, a rank that is killed under load, long prompts,
products of axes, DeepSeek V3's shape in FP8 with fewer layers. Engines are processes with a limit; every figure is printed and
appended to $OUT/layouts.jsonl as it comes, beside what the model of bench/layouts.py predicts. `--rehearse`: tiny shapes, with
gloo on CPUs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import layouts
from fixed import SHAPES, workloads, write
from gpu_http import load, server
from layouts import child, say

_OPEN = 16
"""Requests that are open when a rank is killed."""

Part = tuple[str, Callable[[float], None]]
"""The kind of a part, and the part itself, given the seconds that it may take."""


def parts(cards: int, rehearse: bool) -> Iterator[Part]:
    """The most valuable first."""
    large, middle, mixed = ("tiny", "tiny", "tiny-moe") if rehearse else ("llama70b", "llama8b", "qwen30b_a3b")
    decode = "decode_b1" if rehearse else "decode_b1,decode_b8,decode_b32,decode_b256"

    def time_of(shape: str, layout: str, names: str, repeats: int = 1) -> Part:
        words = ("timed", shape, layout, names, "--repeats", str(repeats))
        return "time", lambda limit: child(*words, limit=limit, told=lambda line: say(**line, **foretold(line)))

    yield time_of(large, f"tp{cards}", decode)
    yield time_of(middle, f"tp{cards}", decode + ("" if rehearse else ",prefill_8k,prefill_16x2k"))
    yield "equal", lambda limit: layouts.equal([f"tp{cards}", f"ep{cards}", f"cp{cards}", *_products(cards)], limit,
                                               layouts.KINDS[:2] if rehearse else layouts.KINDS)
    yield time_of(mixed, f"ep{cards}", decode)
    yield time_of(mixed, f"dpep{cards}", "decode_b1" if rehearse else "decode_b256")
    # As many sequences for each card as one has, and experts that move.
    yield time_of(mixed, "one", "decode_b1" if rehearse else "decode_b256")
    yield time_of(mixed, f"dpepb{cards}", "decode_b1" if rehearse else f"decode_b{256 * cards}")
    yield "served", lambda limit: served(middle, (1, cards), 2 if rehearse else 256, limit)
    yield "fault", lambda limit: killed(middle, cards, limit)
    yield time_of(middle, f"cp{cards}", "decode_b1" if rehearse else "prompt_120k", 1)
    if not rehearse:
        yield time_of(middle, f"cp{cards}", "prompt_500k", 0)
        yield time_of(middle, "one", "prompt_120k", 0)
    for layout in _products(cards):
        yield time_of(middle, layout, decode)
    yield time_of(mixed, f"tp{cards}", decode)
    if not rehearse:
        yield time_of("dsv3-few", f"dpep{cards}", "decode_b32,decode_b256")


def _products(cards: int) -> list[str]:
    return [name for name, options in layouts.LAYOUTS.items()
            if len(sizes := [one for one in options.values() if type(one) is int]) > 1 and sizes[0] * sizes[1] == cards]


_ALONE: dict[tuple[str, str], float] = {}
"""Seconds on one card, by shape and workload."""


def foretold(line: dict[str, Any]) -> dict[str, float]:
    """The seconds that the simulator predicts for a workload, where it knows the layout; where each of n cards has as many
    sequences as one card had, the share of n times its rate."""
    shape, layout, workload = (str(line.get(name, "")) for name in ("shape", "layout", "workload"))
    axis, number = ("tp", "1") if layout == "one" else (layout[:2], layout[2:])
    found, sequences = dict[str, float](), workload.removeprefix("decode_b")
    if layout == "one" and "seconds" in line:
        _ALONE[shape, workload] = line["seconds"]
    elif layout.startswith("dpepb") and (shape, "decode_b256") in _ALONE and sequences == str(256 * int(layout[5:])):
        found["of_linear"] = round(_ALONE[shape, "decode_b256"] / line["seconds"], 3)
    asks = dict(workloads(shape)).get(workload) if shape in SHAPES else None
    if asks and axis in ("tp", "ep", "dp") and number.isdigit():
        engine = layouts.cost(shape, "one" if axis == "dp" else axis + number)
        found["predicted"] = round(layouts.simulated(engine, asks, int(number) if axis == "dp" else 1), 4)
    return found


def _flags(*more: str) -> list[str]:
    return ["--max-model-len", "2048", "--gpu-memory-utilization", "0.85", "--device", layouts.DEVICE, "--threads", "1", *more]


def served(shape: str, replicas: Sequence[int], concurrency: int, limit: float) -> None:
    """Tokens a second over HTTP of so many replicas, each with as many requests at once as the first."""
    rates = dict[int, float]()
    config = (SHAPES | layouts.SMALL)[shape]
    for count in replicas:
        with TemporaryDirectory() as folder:
            model = write(config, Path(folder) / shape)
            with server(model, _flags("--data-parallel-size", str(count))) as (address, ready):
                # Closed loops of an external process; the limit is the sitting's.
                found = load(None, address, model, config["vocab_size"], count * concurrency)
                rates[count] = found.tokens_per_second or 0.0
        say(served=shape, replicas=count, ready_s=round(ready, 1), tokens_per_second=round(rates[count], 1), limit=limit,
            of_one=round(rates[count] / rates[replicas[0]], 3) if rates[replicas[0]] else None)


def killed(shape: str, ranks: int, limit: float) -> None:
    """Kills a rank under load: seconds until every open request has ended, and until the server answers again."""
    config = (SHAPES | layouts.SMALL)[shape]
    with TemporaryDirectory() as folder:
        model = write(config, Path(folder) / shape)
        with server(model, _flags("--tensor-parallel-size", str(ranks), "--restart", "ranks")) as (address, ready):
            ended: list[int] = []
            threads = [threading.Thread(target=lambda: ended.append(_ask(address, 1500))) for _ in range(_OPEN)]
            for thread in threads:
                thread.start()
            time.sleep(2)
            victim = _ranks(os.getpid())[-1]
            began = time.perf_counter()
            os.kill(victim, signal.SIGKILL)
            for thread in threads:
                thread.join(limit)
            noticed = time.perf_counter() - began
            while _ask(address, 4) != 200 and time.perf_counter() - began < limit:
                time.sleep(0.2)
            say(killed=shape, ranks=ranks, ready_s=round(ready, 1), statuses=sorted(set(ended)), all_ended_s=round(noticed, 2),
                again_s=round(time.perf_counter() - began, 1))


def _ask(address: str, tokens: int) -> int:
    """The status of one answer; 0: no connection."""
    body = json.dumps({"prompt": [[5, 7, 9]], "max_tokens": tokens, "ignore_eos": True, "return_token_ids": True}).encode()
    request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def _ranks(parent: int) -> list[int]:
    """The processes of ranks below a process, by number."""
    found, below = [], {parent}
    for folder in sorted((path for path in Path("/proc").iterdir() if path.name.isdigit()), key=lambda path: int(path.name)):
        try:
            above = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if above in below:
            below.add(int(folder.name))
            found += [int(folder.name)] * (b"penstock.worker.process" in command)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cards", type=int)
    parser.add_argument("--seconds", type=float, default=1500.0, help="of the whole sitting")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of one part")
    parser.add_argument("--only", nargs="*", help="kinds of parts: time, equal, served, fault")
    parser.add_argument("--most", type=int, help="the first so many parts")
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    if args.rehearse:
        layouts.DEVICE = os.environ["DEVICE"] = "cpu"
    end = time.monotonic() + args.seconds
    wanted = (part for part in parts(args.cards, args.rehearse) if not args.only or part[0] in args.only)
    for kind, run in itertools.islice(wanted, args.most):
        left = end - time.monotonic()
        if left < 10:
            say(stopped="the sitting's time is over", before=kind)
            break
        try:
            run(min(args.limit, left))
        except Exception as error:  # noqa: BLE001 (a part that fails does not stop the others)
            say(failed=kind, why=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
