"""Benefit and cost of the tiers behind the device: time to first token of a long prefix from each, transfer rates, overhead.

    python bench/tiers.py --model llama8b --device cuda --disk /tmp/pages

Weights are random (load_format dummy). Three things are measured:

* The first token of a request whose prompt was computed before: on the device, from host memory after it was evicted there,
  from disk after a restart, and computed (`first_token`). Medians of --repeats.
* The host's transfer rate as the movers reach it beside that of one large copy of pinned memory (`rate`).
* Tokens a second of a load of requests that share nothing, with tiers that save every page and without, in turns on two
  engines in one process (`overhead`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penstock.cli.bench.environment import environment
from penstock.config.schema import EngineOptions
from penstock.core.plan import Load, PageName, Piece, Save, StepPlan
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.engine.engine import Engine
from shapes import SHAPES, write

GIB = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="llama15m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=8192, help="of the prefix")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--disk", help="folder for pages; by default a temporary one")
    parser.add_argument("--requests", type=int, default=96, help="of the load without hits")
    parser.add_argument("--kinds", nargs="*", default=["device", "host", "disk", "small"],
                        help="what the load runs on; device first")
    parser.add_argument("--parts", nargs="*", default=["first_token", "rate", "overhead"],
                        help="rate is measured together with first_token")
    parser.add_argument("--json", type=Path, help="append the record to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(args, Path(scratch))
        record: dict[str, Any] = {"bench": "tiers", "model": args.model, "tokens": args.tokens}
        if "first_token" in args.parts:
            record["first_token"] = bench.first_token()
            record["rate"] = bench.rates
        if "overhead" in args.parts:
            record["overhead"] = bench.overhead()
        record["environment"] = environment()
    for part in ("first_token", "rate", "overhead"):
        for name, value in record.get(part, {}).items():
            if name != "all":
                print(part, name, json.dumps(value))
    if args.json is not None:
        with args.json.open("a") as file:
            file.write(json.dumps(record) + "\n")


class Bench:
    """One run's settings."""

    def __init__(self, args: argparse.Namespace, scratch: Path) -> None:
        self.args = args
        self.folder = write(args.model, scratch)
        self.disk = args.disk or str(scratch / "pages")
        self.vocabulary = SHAPES[args.model]["vocab_size"]
        self.rng = random.Random(0)
        self.numbers = iter(range(1 << 30))
        self.rates: dict[str, Any] = {}

    def engine(self, pages: int, **options: Any) -> Engine:
        """An engine whose device holds `pages` pages of 16 tokens."""
        shape = SHAPES[self.args.model]
        size = shape.get("head_dim", shape["hidden_size"] // shape["num_attention_heads"])
        page = 16 * 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * size
        return Engine(EngineOptions(model=str(self.folder), device=self.args.device, load_format="dummy", block_size=16,
                                    skip_tokenizer_init=True, max_model_len=min(shape["max_position_embeddings"],
                                                                                max(self.args.tokens + 64, 1024)),
                                    kv_cache_memory_bytes=pages * page, **options))

    def prompt(self, count: int) -> list[int]:
        return [self.rng.randrange(3, self.vocabulary) for _ in range(count)]

    def ask(self, engine: Engine, prompts: list[list[int]], output: int) -> tuple[float, float]:
        """Seconds until the first token of the first, and until the last of all."""
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, seed=0)
        name = next(self.numbers)
        start, first = time.perf_counter(), 0.0
        for i, prompt in enumerate(prompts):
            engine.submit(Request(f"{name}-{i}", prompt, params))
        left = len(prompts)
        while left:
            for update in engine.turn():
                first = first or time.perf_counter() - start
                left -= update.finish_reason is not None
        return first, time.perf_counter() - start

    def first_token(self) -> dict[str, Any]:
        """Seconds by where the prefix comes from."""
        tokens, repeats = self.args.tokens, self.args.repeats
        pages = -(-tokens // 16)
        size = 2 * pages + pages // 2
        options = {"cache_host_bytes": self.host_bytes(8 * pages), "cache_disk": self.disk, "cache_disk_bytes": 256 * GIB,
                   "cache_load": "always"}
        engine = self.engine(size, **options)
        prefixes = [self.prompt(tokens) for _ in range(2 + repeats)]
        found: dict[str, list[float]] = {"computed": [], "device": [], "host": [], "disk": []}
        self.ask(engine, [prefixes[0]], 1)
        for prefix in prefixes[1:]:
            found["computed"].append(self.ask(engine, [prefix], 1)[0])
            found["device"].append(self.ask(engine, [prefix], 1)[0])
        settle(engine)
        # By now the device holds the last two; the first is asked once to warm up.
        for prefix in prefixes[:1 + repeats]:
            found["host"].append(self.ask(engine, [prefix], 1)[0])
        hits = hits_of(engine)
        if "rate" in self.args.parts:
            self.rates = self.rate(engine)
        engine.close()
        # Readers are slowed by pages that the system has yet to write to the disk; a restart takes longer than that.
        os.sync()
        again = self.engine(size, **options)
        self.ask(again, [self.prompt(64)], 1)
        for prefix in prefixes[:1 + repeats]:
            found["disk"].append(self.ask(again, [prefix], 1)[0])
        hits["disk"] = hits_of(again).get("disk", 0)
        rates = rates_of(engine) | rates_of(again)
        again.close()
        median = {where: statistics.median(values[1:]) for where, values in found.items()}
        return {"seconds": median, "all": found, "times_faster": {where: median["computed"] / seconds
                                                                  for where, seconds in median.items()},
                "hit_tokens": hits, "bytes_per_second": rates}

    def host_bytes(self, pages: int) -> int:
        shape = SHAPES[self.args.model]
        size = shape.get("head_dim", shape["hidden_size"] // shape["num_attention_heads"])
        return max(GIB // 4, pages * 16 * 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * size)

    def rate(self, engine: Engine) -> dict[str, Any]:
        """Bytes a second between host and device: by the movers, in pages that lie apart, and by one large copy. Spoils what
        the engine has cached."""
        pages = -(-self.args.tokens // 16)
        movers, arena = engine.rank.worker.movers, engine.rank.worker.arena
        assert movers is not None
        nbytes = pages * arena.layout.groups[0].page_bytes
        # Every other page, so that no two can be copied in one piece.
        sources = list(range(0, 2 * pages, 2))
        with torch.inference_mode(), torch.cuda.stream(engine.rank.worker.stream):
            def save() -> None:
                movers.start(StepPlan(0, transfers=[Save(0, page, slot) for slot, page in enumerate(sources)]))
                movers._saved.wait()

            def load() -> None:
                pieces = [Piece(PageName(0, b""), page, slot, -1) for slot, page in enumerate(sources)]
                movers.load(StepPlan(0, transfers=[Load(1, pieces, 60.0)]))
                while not movers.arrived(wait=True)[0]:
                    pass

            found = {"saved": nbytes / best(save), "loaded": nbytes / best(load)}
            if self.args.device != "cpu":
                host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
                there = torch.empty(nbytes, dtype=torch.uint8, device=self.args.device)

                def copy(to: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
                    def run() -> None:
                        to.copy_(source, non_blocking=True)
                        torch.cuda.synchronize()
                    return run

                found |= {"link_to_device": nbytes / best(copy(there, host)), "link_to_host": nbytes / best(copy(host, there))}
                found |= {"loaded_share": found["loaded"] / found["link_to_device"],
                          "saved_share": found["saved"] / found["link_to_host"]}
        return found

    def overhead(self) -> dict[str, Any]:
        """Tokens a second of requests that share nothing, without tiers, with a host that is larger than the device's cache, as
        it mostly is, with that and a disk, and with a disk behind a host that is smaller."""
        pages = self.args.requests * 52
        disk = {"cache_disk": self.disk + "-load", "cache_disk_bytes": 16 * GIB}
        kinds: dict[str, dict[str, Any]] = {
            "device": {}, "host": {"cache_host_bytes": self.host_bytes(pages * 5 // 4)},
            "disk": {"cache_host_bytes": self.host_bytes(pages * 5 // 4), **disk},
            "small": {"cache_host_bytes": self.host_bytes(pages // 2), **disk}}
        engines = {kind: self.engine(pages, **kinds[kind]) for kind in self.args.kinds}
        found: dict[str, list[float]] = {kind: [] for kind in engines}
        for round_ in range(self.args.repeats + 1):
            for kind, engine in engines.items():
                prompts = [self.prompt(512) for _ in range(self.args.requests)]
                seconds = self.ask(engine, prompts, 256)[1]
                if round_:
                    found[kind].append(self.args.requests * (512 + 256) / seconds)
        for engine in engines.values():
            engine.close()
        median = {kind: statistics.median(values) for kind, values in found.items()}
        return {"tokens_per_second": median, "all": found,
                "share": {kind: value / median["device"] for kind, value in median.items()}}


def best(run: Callable[[], None]) -> float:
    """The least seconds of several runs."""
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def settle(engine: Engine) -> None:
    """Until every page is where it is to go."""
    until = time.perf_counter() + 30
    while engine.writing and time.perf_counter() < until:
        engine.turn()


def hits_of(engine: Engine) -> dict[str, int]:
    return {tier.name: tier.hit_tokens for tier in engine.stats().tiers}


def rates_of(engine: Engine) -> dict[str, float]:
    """The cost model's measurements."""
    tiers = engine.tiers.hierarchy
    return {name: source.rate for name, source in tiers.costs.sources.items() if source.rate} if tiers is not None else {}


if __name__ == "__main__":
    sys.exit(main())
