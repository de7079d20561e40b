"""Promises kept over HTTP: canary behind a real server, loaded by `penstock bench serve`.

low       half of what it can serve: output tokens/s with promises and first come first served
overload  half to three times what it can serve: goodput, refusals and their time, the engine's memory
long      short requests with and without prompts that fill the context
tenants   ten keys, one of which sends ten times as much: Jain's index over the tokens that they had
simulated the same requests over HTTP and by `penstock simulate`: TTFT and TPOT of both

usage: python bench/http_cases.py [--case overload ...] [--held] [--seconds 20] [--output FILE.json]
                                   [--cores 0-3 4-7] [--threads 2]

`--held` holds each step back to a cost model's time (`slow_engine.py`): a client on the same cores slows the server less.
`--cores` gives the server and the clients processors of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.cli.bench.environment import environment

ROOT = Path(__file__).resolve().parents[1]
PORT = 8765
URL = f"http://127.0.0.1:{PORT}"
ROWS = 16
COST = {"name": "15 ms a step, 0.5 ms a row, 0.2 ms a token", "kv_tokens": 65536, "max_num_seqs": ROWS,
        "max_num_batched_tokens": 512, "max_model_len": 2048, "step_target": 0.05,
        "weights": {"step": 0.015, "segment": 0.0005, **{f"tokens_from_{n}": 0.0002 for n in (0, 4, 16, 64, 256, 1024, 4096)}}}
CLASSES = {"interactive": {"ttft": 2.0, "tpot": 0.05}, "real": {"ttft": 0.3, "tpot": 0.02}}
"""Promises of the held server, and those of canary's own steps, which take about a tenth of the time."""
SHORT = ("--random-input-len", "150", "--random-output-len", "15", "--random-range-ratio", "0.33")
PENSTOCK = (sys.executable, "-m", "penstock.cli.main")
loads = [0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0]
"""Of the overload, in multiples of the capacity."""
MEANS = ("time_to_first_token", "request_queue_time", "request_prefill_time")
"""Histograms of the server, without vLLM's prefix and `_seconds`."""
cores: list[list[str]] = [[], []]
"""The commands of the server and of the clients begin with these."""
threads: list[str] = []
"""The server's option."""


@contextlib.contextmanager
def server(held: bool, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """A ready server."""
    with tempfile.TemporaryDirectory() as folder:
        cost, classes = Path(folder) / "cost.json", Path(folder) / "classes.json"
        cost.write_text(json.dumps(COST))
        promised = CLASSES["interactive" if held else "real"]
        classes.write_text(json.dumps({"interactive": promised | {"weight": 20, "queue": 512}}))
        start = [sys.executable, str(ROOT / "bench/slow_engine.py")] if held else \
            [*PENSTOCK, "serve", "canary", "--classes", str(classes), "--no-log-requests"]
        command = [*start, "--port", str(PORT), "--max-num-seqs", str(ROWS)]
        process = subprocess.Popen([*cores[0], *command, *flags, *(() if held else threads)], stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL, env=os.environ | {"PENSTOCK_COST": str(cost)})
        try:
            until = time.monotonic() + 60
            while time.monotonic() < until:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{URL}/health", timeout=5).read()
                    break
                time.sleep(0.2)
            yield process
        finally:
            process.terminate()
            process.wait(30)


def load(*flags: str, tier: str = "interactive", key: str = "") -> subprocess.Popen[bytes]:
    """A client that begins now and prints its figures as JSON."""
    return subprocess.Popen([*cores[1], *PENSTOCK, "bench", "serve", "--url", URL, "--json", "--quiet", "--extra-body",
                             json.dumps({"service_tier": tier}), *flags],
                            env=os.environ | ({"PENSTOCK_API_KEY": key} if key else {}), stdout=subprocess.PIPE)


def figures(client: subprocess.Popen[bytes]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(client.communicate()[0])
    return found


def goodput(held: bool) -> tuple[str, str]:
    promised = CLASSES["interactive" if held else "real"]
    return "--goodput", f"ttft:{promised['ttft'] * 1e3:g},tpot:{promised['tpot'] * 1e3:g}"


def capacity() -> float:
    """Requests a second that a closed loop over all rows gets, once the server has warmed up."""
    for turns in (6, 24):
        closed = figures(load(*SHORT, "--num-prompts", str(turns * ROWS), "--max-concurrency", str(ROWS), "--seed", str(turns),
                              tier="flex"))
    return float(closed["request_throughput"])


def short(rate: float, seconds: float, held: bool, number: int = 0) -> dict[str, Any]:
    """Figures of short interactive requests at a rate. `number` of the load: prompts of another one are in the prefix cache."""
    seen = figures(load(*SHORT, "--num-prompts", str(int(rate * seconds)), "--request-rate", f"{rate}", "--save-detailed",
                        "--seed", str(100 + number), *goodput(held)))
    promised = CLASSES["interactive" if held else "real"]
    per = [statistics.fmean(gaps) for gaps in seen["itls"] if gaps]
    return seen | {"late_ttft": sum(ttft > promised["ttft"] for ttft in seen["ttfts"] if ttft is not None),
                   "late_tpot": sum(gap > promised["tpot"] for gap in per)}


def worked(process: subprocess.Popen[bytes]) -> list[float]:
    """Processor seconds of the server and of its engine so far."""
    ticks = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in family(process)]
    seconds = [(int(one[11]) + int(one[12])) / os.sysconf("SC_CLK_TCK") for one in ticks]
    return [seconds[0], sum(seconds[1:])]


def counts(since: dict[str, float] | None = None) -> dict[str, float]:
    """Values of the server's metrics, less those of an earlier time."""
    lines = urllib.request.urlopen(f"{URL}/metrics", timeout=5).read().decode().splitlines()
    found = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    names = [(name.partition("{")[0], float(value)) for name, _, value in found]
    return {name: value - (since or {}).get(name, 0.0) for name, value in names}


def mean(now: dict[str, float], above: str, below: str) -> float:
    """Milliseconds: of one counter, in seconds, for each of another."""
    return round(1e3 * now[above] / max(1.0, now[below]), 3)


def steps(now: dict[str, float]) -> dict[str, float]:
    """Steps, and what each took in the worker and for planning."""
    each = {f"{name}_ms": mean(now, f"penstock:{name}_seconds_total", "penstock:steps_total") for name in ("worker", "plan")}
    return {"steps": now["penstock:steps_total"], **each}


def family(process: subprocess.Popen[bytes]) -> tuple[str, ...]:
    """The server's process id, and that of its engine."""
    return str(process.pid), *Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


def resident(process: subprocess.Popen[bytes]) -> int:
    """Bytes of memory of the server and its engine."""
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in family(process))


def low(held: bool, seconds: float) -> list[dict[str, Any]]:
    found = []
    for policy in ("fcfs", "promises", "promises", "fcfs"):
        flags = () if held else ("--scheduling-policy", policy)
        with server(held, *flags):
            rate = capacity() / 2 if not found else found[0]["rate"]
            found.append({"policy": policy, "rate": rate, **pick(short(rate, seconds, held))})
            print(json.dumps(found[-1]), flush=True)
        if held:
            break
    return found


def pick(seen: dict[str, Any]) -> dict[str, Any]:
    names = ("completed", "failed", "late_ttft", "late_tpot", "duration", "client_cpu_share", "request_goodput",
             "output_throughput", "p50_ttft_ms", "p99_ttft_ms", "p99_tpot_ms", "p99_itl_ms",
             "p50_refusal_ms", "p99_refusal_ms", "first_error")
    found = {name: seen[name] for name in names if seen.get(name) is not None}
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in found.items()}


def overload(held: bool, seconds: float) -> list[dict[str, Any]]:
    found = []
    with server(held) as process:
        most = capacity()
        for number, share in enumerate(loads):
            before, spent, counted, rate = resident(process), worked(process), counts(), most * share
            seen = pick(short(rate, seconds, held, number))
            grown, used = resident(process) / before - 1, [round(b - a, 2) for a, b in zip(spent, worked(process), strict=True)]
            found.append({"load": share, "rate": round(rate, 1), **seen, "grown": round(grown, 4),
                          "cpu_seconds": dict(zip(("frontend", "engine"), used, strict=True)), **steps(counts(counted))})
            print(json.dumps(found[-1]), flush=True)
    return found


def long(held: bool, seconds: float) -> list[dict[str, Any]]:
    found = []
    with server(held, "--no-enable-prefix-caching") if not held else server(held) as process:
        rate, length = capacity() * 0.3, 2000 if held else 4000
        assert process.poll() is None
        for beside in (False, True, False, True):
            others = load("--random-input-len", str(length), "--random-output-len", "4", "--num-warmups", "0", "--request-rate",
                          "0.2", "--num-prompts", str(max(1, int(seconds / 5))), "--seed", str(len(found)),
                          tier="default") if beside else None
            found.append({"beside long prompts": beside, **pick(short(rate, seconds, held))})
            if others is not None:
                seen = figures(others)
                found[-1] |= {"long ttft p50": seen["p50_ttft_ms"], "long failed": seen["failed"]}
            print(json.dumps(found[-1]), flush=True)
    return found


def tenants(held: bool, seconds: float) -> list[dict[str, Any]]:
    """Closed loops, each with more requests in flight than its share of rows."""
    assert not held, "slow_engine.py takes no keys"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys.json"
        keys = [subprocess.run([*PENSTOCK, "keys", "add", str(file), "--tenant", f"t{i}"], check=True, capture_output=True,
                               text=True).stdout.split()[-1] for i in range(10)]
        with server(held, "--keys-file", str(file)):
            clients = [load(*SHORT, "--num-prompts", str((30 if i else 300) * int(seconds)), "--max-concurrency",
                            str(4 if i else 40), "--save-detailed", "--seed", str(i), tier="flex", key=key)
                       for i, key in enumerate(keys)]
            seen = [figures(client) for client in clients]
    # All are backlogged until the first of them has no request left to send.
    until = min(max(one["start_times"]) for one in seen)
    served = [sum(n_in + n_out for start, latency, n_in, n_out in zip(one["start_times"], one["latencies"], one["input_lens"],
                                                                     one["output_lens"], strict=True)
                  if latency is not None and 2.0 < start + latency < until) for one in seen]
    jain = sum(served) ** 2 / (len(served) * sum(value * value for value in served))
    found = [{"seconds": round(until - 2, 1), "tokens": served, "failed": [one["failed"] for one in seen],
              "jain": round(jain, 4)}]
    print(json.dumps(found[-1]), flush=True)
    return found


def simulated(held: bool, seconds: float) -> list[dict[str, Any]]:
    """The same requests at 70 % of the capacity, over HTTP and simulated with the server's own model of step time."""
    shape = ("--random-input-len", "800", "--random-output-len", "30", "--random-range-ratio", "0.33")
    with server(held, *(() if held else ("--no-enable-prefix-caching",))), tempfile.TemporaryDirectory() as folder:
        closed = [figures(load(*shape, "--num-prompts", str(turns * ROWS), "--max-concurrency", str(ROWS), tier="default"))
                  for turns in (3, 6)]
        rate, before = 0.7 * closed[1]["request_throughput"], counts()
        real = figures(load(*shape, "--num-prompts", str(int(rate * seconds)), "--request-rate", f"{rate}", "--save-detailed",
                            tier="default"))
        now = counts(before)
        trace, cost = Path(folder) / "trace.jsonl", Path(folder) / "cost.json"
        model = urllib.request.urlopen(f"{URL}/step_time", timeout=5).read()
        cost.write_bytes(model)
        names = ("start_times", "input_lens", "output_lens")
        trace.write_text("".join(json.dumps({"timestamp": start * 1e3, "input_length": n_in, "output_length": n_out}) + "\n"
                                 for start, n_in, n_out in zip(*map(real.__getitem__, names), strict=True)))
        predicted = json.loads(subprocess.run([*PENSTOCK, "simulate", str(trace), "--model-cost", str(cost), "--json"],
                                              check=True, capture_output=True).stdout)
        standard, busy = predicted["classes"]["standard"], now["penstock:worker_seconds_total"] / real["duration"]
    pairs = {f"p{share}_{name}_ms": (real[f"p{share}_{name}_ms"], standard[f"{name}_p{share}"] * 1e3)
             for name in ("ttft", "tpot") for share in (50, 99)}
    means = {name: mean(now, f"vllm:{name}_seconds_sum", f"vllm:{name}_seconds_count") for name in MEANS}
    found = [{"rate": round(rate, 2), "requests": real["completed"], "mean_ttft_ms": round(real["mean_ttft_ms"], 2),
              "server_ms": means, "busy": round(busy, 3), "simulated_busy": round(predicted["utilisation"][0], 3),
              **steps(now), "cost": json.loads(model),
              **{name: {"measured": round(ours, 2), "simulated": round(theirs, 2), "off": round(theirs / ours - 1, 3)}
                 for name, (ours, theirs) in pairs.items()}}]
    print(json.dumps(found[-1]), flush=True)
    return found


CASES = {"low": low, "overload": overload, "long": long, "tenants": tenants, "simulated": simulated}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--held", action="store_true")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--loads", nargs="+", type=float, default=loads, help="of the overload, in multiples of the capacity")
    parser.add_argument("--cores", nargs=2, metavar=("SERVER", "CLIENTS"), help="as taskset -c takes them; by default any")
    parser.add_argument("--threads", type=int, help="of the server's kernels")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    loads[:] = args.loads
    cores[:] = [["taskset", "-c", one] for one in args.cores] if args.cores else cores
    threads[:] = ["--threads", str(args.threads)] if args.threads else []
    result = {name: CASES[name](args.held, args.seconds) for name in args.case if not (args.held and name == "tenants")}
    if args.output:
        args.output.write_text(json.dumps({"environment": environment(), "held": args.held, **result}, indent=1))


if __name__ == "__main__":
    main()
