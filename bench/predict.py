"""Predicted times of the fixed workloads on a card, from its kernels' measured times: the real LLM, engine, scheduler and cache
(`host.py`), and a device that computes nothing in the time that each step would need. Time is virtual: the host's is its
processor time, and the device's begins with a launch, so it also tells how long the device waits for the host.

usage: python bench/predict.py [--shape llama8b qwen06b] [--workload offline_mix1000] [--rows 256 1024] [--given] [--cards 2]
       python bench/predict.py --step-ms 2 4 8 --rows 256 1024: steps of a fixed time instead, requests ending in every one
       python bench/predict.py --streams 1 32 256: a server's closed loops instead, without what HTTP costs
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from fixed import LOAD, PEER, SHAPES, TARGET, Ask, sizes, workloads
from host import NoEngine, NoLLM, Times, params, prompts
from layouts import predicted
from penstock.cli.bench.environment import environment
from penstock.cli.serve import STEP_TARGET_MS
from penstock.config.resolve import graph_tokens
from penstock.core.plan import StepPlan, StepResult
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.engine import engine as engine_module, llm as llm_module
from penstock.engine.executor import Direct, Pending
from penstock.worker.graphs import Buckets
from penstock.worker.worker import Worker

RESULTS = Path(__file__).parent / "results"
KV_TOKENS = {"llama8b": 832_016, "qwen06b": 1_089_328}
"""Bytes that fit beside the weights at 0.85 of an H200."""

READS = {"llama8b": 4.3e6, "qwen06b": 4.5e6}
"""Bytes of the cache that attention over single tokens reads in a microsecond."""
READING = {16: 8e6, 128: 60e6, 512: 190e6, 1024: 270e6, 2048: 350e6, 8192: 600e6}
"""FLOP that attention does in a microsecond, by the length of a prompt's segment (bench/notes.md, "GPU: attention")."""
A_KERNEL = 8.0
"""Microseconds of an attention kernel besides."""
A_STEP, A_LINE = 60.0, 0.15
"""Microseconds of a step, and of each sampled line, for building it and choosing."""
EAGER = 12.0
"""Microseconds of the host for a kernel launched alone, of which a layer has about ten."""
AMONG = {"llama8b": (1.04, 550.0, 1100.0), "qwen06b": (1.0, 150.0, 600.0)}
"""Time of GEMMs of more than 256 rows inside a step, relative to alone; and microseconds that a mixed step takes
besides, and one that is launched kernel by kernel: fitted to `results/gpu_mix_steps.txt`."""
EMPTY = 0.7
"""The cost of a row of padding, relative to a row of tokens."""


class Card:
    """Microseconds of a step on an H200, from what was measured of kernels alone (`results/gpu_linear.json`); on several
    `cards` by the ratio that docs/parallel.md has on paper."""

    def __init__(self, shape: str, cards: int = 1) -> None:
        self._shape, self._cards = shape, cards
        found = json.loads((RESULTS / "gpu_linear.json").read_text())
        size, config = {"llama8b": "8b", "qwen06b": "06b"}[shape], SHAPES[shape]
        self.layers, self.heads = config["num_hidden_layers"], config["num_attention_heads"]
        self.entry = 2 * 2 * config["num_key_value_heads"] * config["head_dim"]
        self.reads, (self.among, self.mixed, self.eager) = READS[shape], AMONG[shape]
        # Norms, gate and rope, at the rates of results/gpu_rows.json: they read and write some ten times the width of a row.
        self.row = 0.046 if shape == "llama8b" else 0.0135
        # As an engine with default options has them.
        self.buckets = Buckets(graph_tokens(sizes(config).weights), 1024, 16_384)
        self.products, self.head = {0: 0.0}, {0: 0.0}
        for product in found["products"]:
            best = min([product["cublas_us"], *(tile["us"] for tile in product["tiles"])])
            into = self.head if product["shape"] == f"{size}.head" else self.products
            if product["shape"].startswith(f"{size}."):
                into[product["rows"]] = into.get(product["rows"], 0.0) + best
        self.products |= {chain["rows"]: chain["linked_us"] for chain in found["chains"] if chain["chain"] == size}

    def step(self, plan: StepPlan) -> float:
        """Seconds."""
        tokens, context, single = int(plan.counts.sum()), plan.starts + plan.counts, plan.counts == 1
        padded = self.padded(plan)
        rows = tokens + EMPTY * (padded - tokens) if padded else tokens
        layer = _between(self.products, rows) * (self.among if rows > 256 else 1.0) + A_KERNEL / 2 + self.row * tokens
        step = A_STEP if padded else A_STEP + self.eager
        if single.any():
            layer += A_KERNEL + float(context[single].sum()) * self.entry / self.reads
        if not single.all():
            step += self.mixed
            counts, starts = plan.counts[~single].astype(float), plan.starts[~single]
            work = 2 * counts * (2 * starts + counts) * self.heads * 128
            rate = np.interp(np.log2(counts), np.log2(list(READING)), list(READING.values()))
            layer += A_KERNEL + float((work / rate).sum())
        lines = int((plan.wants & 1).sum())
        return (layer * self.layers + _between(self.head, lines) + A_LINE * lines + step) / 1e6 * self._share(plan)

    def _share(self, plan: StepPlan) -> float:
        """The time of a step over all cards, relative to one."""
        if self._cards == 1 or not len(plan.counts):
            return 1.0
        single, tokens = plan.counts == 1, int(plan.counts.sum())
        pairs = float((plan.counts * (plan.starts + plan.counts / 2))[~single].sum())
        context = float(plan.starts[single].sum()) / tokens
        alone, several = (predicted(self._shape, cards, tokens, context, pairs=pairs)["seconds"] for cards in (1, self._cards))
        return several / alone

    def padded(self, plan: StepPlan) -> int:
        """Rows of the captured step that a plan fits in; 0 if it is launched kernel by kernel."""
        bucket = self.buckets.of(plan, int((plan.wants & 1).sum()))
        return 0 if bucket is None else bucket.tokens

    def launching(self, plan: StepPlan) -> float:
        """Seconds of the host that `host.py`'s worker without kernels does not have: replaying a graph, or launching all."""
        return (150.0 if self.padded(plan) else 150.0 + 10 * EAGER * self.layers) / 1e6


class VirtualDevice:
    """Takes plans as an executor's worker does; `now` is the host's time, `free` when the device is through with all it has."""

    def __init__(self, worker: Worker, step: Callable[[StepPlan], float], launching: Callable[[StepPlan], float]) -> None:
        self._worker, self._step, self._launching = worker, step, launching
        self._seen = time.thread_time()
        self.now = self.free = self.first = self.idle = 0.0
        self.steps = 0

    def catch_up(self) -> None:
        """The host has worked since it was last looked at."""
        self.now += time.thread_time() - self._seen
        self._seen = time.thread_time()

    def skip(self) -> None:
        """Counts the host's time since the last look for nothing."""
        self._seen = time.thread_time()

    def launch(self, plan: StepPlan) -> Pending:
        launched = self._worker.launch(plan)
        self.catch_up()
        self.now += self._launching(plan)
        if self.steps:
            self.idle += max(0.0, self.now - self.free)
        else:
            self.first = self.now
        self.steps += 1
        seconds = self._step(plan)
        self.free = end = max(self.now, self.free) + seconds
        self.skip()  # the model of the device

        def result() -> StepResult:
            self.catch_up()
            self.now = max(self.now, end)
            found = launched.result()
            found.seconds = seconds
            return found
        return SimpleNamespace(result=result)


def measure(asks: list[Ask], device: Callable[[Worker], VirtualDevice], rows: int, tokens: int, kv: int) -> dict[str, float]:
    """Seconds for all of them, from the call; how long until the first launch, and how long the device was idle after that."""
    llm = NoLLM(rows, tokens, 16_384, kv, text=False)
    run = device(llm.engine.rank.worker)
    llm.engine.executor = Direct(run)
    llm.generate([ask.prompt for ask in asks], [params(ask.output) for ask in asks], use_tqdm=False)
    run.catch_up()
    return {"steps": run.steps, "seconds": round(max(run.now, run.free), 4), "first_launch": round(run.first, 4),
            "idle": round(run.idle, 4)}


class Server:
    """An engine as `serve` runs it, on a virtual device, without what HTTP costs. It learns from one load for the next."""

    def __init__(self, device: Callable[[Worker], VirtualDevice], kv: int) -> None:
        self._engine = NoEngine(1024, 8192, 16_384, kv, Times(), STEP_TARGET_MS / 1e3)
        self._device = device(self._engine.rank.worker)
        self._engine.executor = Direct(self._device)
        engine_module.time = SimpleNamespace(time=lambda: self._device.now, perf_counter=lambda: self._device.now)
        self._draw = random.Random(0)
        self._names = map(str, count())

    def closed_loop(self, streams: int, requests: int) -> dict[str, float]:
        """The fixed load over HTTP: each of so many streams asks again a millisecond or two after its last token."""
        run, began = self._device, self._device.now
        coming, left, steps = list[tuple[float, str]](), iter(range(requests)), run.steps
        asked, last, firsts, gaps = dict[str, float](), dict[str, float](), list[float](), list[float]()

        def ask() -> None:
            if next(left, None) is not None:
                heapq.heappush(coming, (run.now + self._draw.uniform(1e-3, 2e-3), next(self._names)))

        for _ in range(streams):
            ask()
        ended = 0
        while ended < requests:
            run.catch_up()
            if not self._engine.busy:
                run.now = max(run.now, coming[0][0])
            while coming and coming[0][0] <= run.now:
                when, name = heapq.heappop(coming)
                asked[name] = when
                prompt = [self._draw.randrange(100, 1000) for _ in range(LOAD[0])]
                self._engine.submit(Request(name, prompt, SamplingParams(max_tokens=LOAD[1], ignore_eos=True, seed=0)))
            run.skip()
            for update in self._engine.turn():
                name = update.request_id
                if name in last:
                    gaps.append(run.now - last[name])
                else:
                    firsts.append(run.now - asked[name])
                last[name] = run.now
                if update.finish_reason is not None:
                    ended += 1
                    ask()
        firsts.sort()
        gaps.sort()
        return {"steps": run.steps - steps, "tokens_per_second": round(requests * LOAD[1] / (run.now - began)),
                "ttft_p50": round(firsts[len(firsts) // 2] * 1e3, 2), "itl_p50": round(gaps[len(gaps) // 2] * 1e3, 2),
                "itl_p99": round(gaps[int(0.99 * len(gaps))] * 1e3, 2)}


def _between(table: dict[int, float], at: int) -> float:
    sizes = sorted(table)
    if at > sizes[-1]:
        return table[sizes[-1]] * at / sizes[-1]
    return float(np.interp(at, sizes, [table[size] for size in sizes]))


def _ending(rows: int) -> list[Ask]:
    """Four times as many requests as run at once, one or more of which end in every step."""
    return [Ask(prompt[:64], 32 + 7 * i % 97) for i, prompt in enumerate(prompts(4 * rows))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", default=["llama8b", "qwen06b"], choices=list(SHAPES))
    parser.add_argument("--workload", nargs="*", default=["offline_mix1000"], help="of bench/gpu.py; all: every one")
    parser.add_argument("--rows", type=int, nargs="*", default=[1024], help="max_num_seqs")
    parser.add_argument("--tokens", type=int, nargs="*", default=[8192], help="max_num_batched_tokens")
    parser.add_argument("--given", action="store_true", help="run prompts in the order in which they are given, all at once")
    parser.add_argument("--step-ms", type=float, nargs="*", default=[], help="steps that take so long, whatever is in them")
    parser.add_argument("--streams", type=int, nargs="*", default=[], help="closed loops of so many at once, one after another")
    parser.add_argument("--cards", type=int, default=1, help="ranks that divide each layer")
    options = parser.parse_args()
    if options.given:
        llm_module._FEW = 1 << 30
        NoLLM._place = lambda self, request: 0  # type: ignore[method-assign]
    for rows in options.rows:
        for milliseconds in options.step_ms:
            found = measure(_ending(rows), lambda worker, ms=milliseconds: VirtualDevice(
                worker, lambda plan: ms / 1e3, lambda plan: 150e-6), rows, 8192, 1 << 20)
            print(json.dumps({"rows": rows, "step_ms": milliseconds, **found, "environment": environment()}), flush=True)
    for shape in options.shape if options.streams else []:
        card = Card(shape, options.cards)
        server = Server(lambda worker, card=card: VirtualDevice(worker, card.step, card.launching), KV_TOKENS[shape])
        for streams in options.streams:
            found = server.closed_loop(streams, 4 * streams)
            print(json.dumps({"shape": shape, "cards": options.cards, "streams": streams, **found,
                              "environment": environment()}), flush=True)
    for shape in options.shape if not (options.step_ms or options.streams) else []:
        card = Card(shape, options.cards)
        measured = json.loads((RESULTS / "gpu_workloads.json").read_text())["shapes"][shape]["workloads"]
        for name, asks in workloads(shape):
            for rows in options.rows:
                for tokens in options.tokens if name in options.workload or "all" in options.workload else []:
                    found = measure(asks, lambda worker, card=card: VirtualDevice(worker, card.step, card.launching),
                                    rows, tokens, KV_TOKENS[shape])
                    print(json.dumps({
                        "shape": shape, "cards": options.cards, "workload": name, "given": options.given, "rows": rows,
                        "tokens": tokens, **found,
                        "measured": measured[name]["seconds"], "target": TARGET[shape][name], "peer": PEER[shape][name],
                        "environment": environment()}), flush=True)


if __name__ == "__main__":
    main()
