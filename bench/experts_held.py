"""Decoding of a mixture over the part of its experts that the card holds: tokens a second, hit rate and PCIe's share.

usage: experts_held.py [--held 128,64,43,16] [--quantization fp8] [--layers 8] [--seconds S] [--output FILE.jsonl]
       experts_held.py --draw FILE.jsonl FILE.svg

The shape is that of 30B-A3B with fewer layers; weights are random, tokens are drawn at temperature 1, so that picks are nearly
even: the hardest case for experts in host memory. Each engine is measured with the CPU's part, if it has one, and, its graphs
captured again, without. Prints a line for each number of sequences. No new part begins after S seconds.

After the runs that are timed, short ones show what a step does: picks are read from the memory that the captured step left them
in, so that the graphs that are timed hold nothing that counts."""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fixed import SHAPES, write
from penstock.cli.bench.drawing import COLOURS, Axis, Box, Line, legend, panel, picture, rounded
from penstock.config.schema import EngineOptions
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.engine.engine import Engine
from penstock.ops.experts_hosted import Residency

BATCHES = {1: 12, 8: 6, 32: 3}
"""Sequences, and the number of short runs whose last step is looked at."""
RUNS, TOKENS, PROMPT = 2, 33, 32
"""Timed runs after one that warms up, the tokens of each sequence in one, and of its prompt."""
_UNUSED = -9


class Seen(NamedTuple):
    """The picks of a layer in a captured step."""

    residency: Residency
    picks: torch.Tensor
    left: torch.Tensor
    """The GPU computes these, the CPU the others."""


class Counted(NamedTuple):
    """Of one layer in one step."""

    picks: int
    hits: int
    """Picks of experts that have a slot."""
    computed: int
    """Picks that the CPU computes."""
    fetched: int
    """Experts that are copied."""


def counted(picks: list[int], left: list[int], slot: list[int]) -> Counted:
    """`picks` and `left` of all tokens, one after another; `slot` by expert, -1: it has none."""
    computed = sum(one != other for one, other in zip(picks, left, strict=True))
    return Counted(len(picks), sum(slot[one] >= 0 for one in picks), computed,
                   len({one for one in left if one >= 0 and slot[one] < 0}))


def link_bytes_per_second(size: int = 1 << 30) -> float:
    """Of copies from pinned memory."""
    host, there = torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.empty(size, dtype=torch.uint8, device="cuda")
    seconds = []
    for _ in range(4):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return size / min(seconds)


class Held:
    """An engine, and what is measured on it."""

    def __init__(self, folder: Path, held: int | None, vocabulary: int, quantization: str | None = None) -> None:
        """`held`: experts of each layer on the card; None: all."""
        more = {"quantization": quantization} | ({} if held is None else {"experts_on_device": str(held)})
        self.seen, self.random, self.vocabulary = dict[tuple[int, int], list[Seen]](), random.Random(0), vocabulary
        """By layer and number of tokens: those of the graphs that were captured for so many, the last one first."""
        self._begin = Residency.begin
        Residency.begin = self._watched()  # type: ignore[method-assign]
        begin = time.perf_counter()
        self.engine = Engine(EngineOptions(
            model=str(folder), load_format="dummy", device="cuda", skip_tokenizer_init=True, max_model_len=1024,
            max_num_seqs=max(BATCHES), max_num_batched_tokens=max(BATCHES) * PROMPT, enable_prefix_caching=False,
            **more))  # type: ignore[arg-type]
        self.start_seconds = time.perf_counter() - begin
        self.worker = self.engine.rank._worker  # type: ignore[attr-defined]
        self.layers = [layer.residency for layer in self.worker.model.experts if layer.residency is not None]

    def _watched(self) -> Any:
        begin, seen = self._begin, self.seen

        def watched(residency: Residency, x: torch.Tensor, picks: torch.Tensor, weights: torch.Tensor, whole: bool) -> Any:
            left, join = begin(residency, x, picks, weights, whole)
            if torch.cuda.is_current_stream_capturing() and len(picks) in BATCHES:
                seen.setdefault((id(residency), len(picks)), []).insert(0, Seen(residency, picks, left))
            return left, join

        return watched

    def without_cpu(self) -> None:
        """Captures all steps again, in which every picked expert that has no slot is fetched."""
        for residency in self.layers:
            residency.helper = None
        self.seen.clear()
        worker, tokens = self.worker, self.engine.config.graph_tokens
        worker.runner.graphs = worker.graphs = None
        gc.collect()
        worker.runner.graphs = worker.graphs = worker._capture(tokens, worker.model, worker.adapters)
        # The picks of warming up do not count.
        worker.model.forget_picks()
        worker._seen = None

    def run(self, batch: int, tokens: int) -> float:
        """Tokens a second from the moment on at which each of `batch` sequences has one."""
        names = {f"{self.random.random()}" for _ in range(batch)}
        for name in names:
            prompt = [self.random.randrange(100, self.vocabulary - 1000) for _ in range(PROMPT)]
            params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, seed=self.random.randrange(1 << 30))
            self.engine.submit(Request(name, prompt, params))
        while names:
            names -= {update.request_id for update in self.engine.turn() if update.token_ids}
        begin, count = time.perf_counter(), 0
        while self.engine.busy:
            count += sum(len(update.token_ids) for update in self.engine.turn())
        return count / (time.perf_counter() - begin)

    def steps(self, batch: int) -> Iterator[Counted]:
        """Counts the work of each layer in the last steps of short runs, between which no expert gets a slot."""
        seen = [each for (_, tokens), each in self.seen.items() if tokens == batch]
        self.worker._picks_due = math.inf
        for _ in range(BATCHES[batch]):
            torch.cuda.synchronize()
            with torch.inference_mode():
                for one in (one for each in seen for one in each):
                    one.picks.fill_(_UNUSED)
            self.run(batch, 4)
            torch.cuda.synchronize()
            for one in (one for each in seen for one in each):
                picks, left, slot = one.picks.flatten().tolist(), one.left.flatten().tolist(), one.residency.slot.tolist()
                # Graphs share memory: in what another one has overwritten there are no experts' numbers.
                if all(0 <= pick < len(slot) for pick in picks):
                    yield counted(picks, left, slot)
        self.worker._picks_due = 0.0

    def measured(self, batch: int, link: float) -> dict[str, Any]:
        """The line of a number of sequences."""
        self.run(batch, TOKENS)
        rates = [self.run(batch, TOKENS) for _ in range(RUNS)]
        step = batch / statistics.median(rates)
        found: dict[str, Any] = {"sequences": batch, "tokens_s": batch / step, "all": rates, "step_ms": step * 1e3}
        if self.layers:
            steps = list(self.steps(batch))
            total = Counted(*map(sum, zip(*steps, strict=True))) if steps else Counted(0, 0, 0, 0)
            each = sum(stack.host[0].nbytes for stack in self.layers[0].stacks)
            fetched = total.fetched / max(1, len(steps))
            rate = fetched * len(self.layers) * each / step
            found |= {"layers_seen": len(steps), "hit_rate": total.hits / max(1, total.picks),
                      "cpu_picks": total.computed / max(1, total.picks), "fetched_a_layer": fetched,
                      "pcie_gb_s": rate / 1e9, "pcie_share": rate / link}
        return found

    def close(self) -> None:
        Residency.begin = self._begin  # type: ignore[method-assign]
        self.seen.clear()
        self.layers.clear()
        self.engine.close()
        del self.engine, self.worker
        gc.collect()
        torch.cuda.empty_cache()


def drawn(lines: list[dict[str, Any]]) -> str:
    """Three panels over the experts held: the rate beside that of all on the card, hit rate, PCIe's share. Full lines are with
    the CPU's part, dashed ones by fetching alone."""
    most = max(line["held"] for line in lines)
    whole = {line["sequences"]: line["tokens_s"] for line in lines if line["held"] == most}
    panels = (("tokens/s, of all on the card", lambda line: line["tokens_s"] / whole[line["sequences"]]),
              ("hit rate", lambda line: line.get("hit_rate", 1.0)),
              ("PCIe's share of its rate", lambda line: line.get("pcie_share", 0.0)))
    parts, drawn_lines = list[str](), list[Line]()
    for place, (title, value) in enumerate(panels):
        drawn_lines = []
        for batch, colour in zip(whole, COLOURS, strict=False):
            for cpu, name in ((True, f"{batch} sequences"), (False, f"{batch}, by fetching alone")):
                points = sorted((line["held"] / most, value(line)) for line in lines
                                if line["sequences"] == batch and (line["cpu"] == cpu or line["held"] == most))
                drawn_lines.append(Line(name, points, colour, not cpu))
        x, y = Axis([0.0, 0.25, 0.5, 0.75, 1.0]), rounded([0.0, *(number for one in drawn_lines for _, number in one.points)])
        parts += panel(Box(60 + place * 340, 40, 270, 260), title, x, y, drawn_lines, below="part of the experts on the card")
    parts += legend(60, 360, drawn_lines[::2], across=190, down=0)
    parts += legend(60, 380, drawn_lines[1::2], across=190, down=0)
    return picture(1030, 395, parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held", default="128,43,64,16", help="experts of each layer on the card, one part for each")
    parser.add_argument("--quantization", help="of the weights, at load")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=140.0, help="no part begins later")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--draw", nargs=2, metavar=("FILE.jsonl", "FILE.svg"), type=Path, help="draw earlier runs")
    args = parser.parse_args()
    if args.draw:
        args.draw[1].write_text(drawn([json.loads(line) for line in args.draw[0].read_text().splitlines()]))
        return 0
    shape = SHAPES["qwen30b_a3b"] | {"num_hidden_layers": args.layers}
    began, link = time.perf_counter(), link_bytes_per_second()
    print(f"pinned memory to the card: {link / 1e9:.1f} GB/s", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model = write(shape, Path(folder) / "model")
        for held in map(int, args.held.split(",")):
            if time.perf_counter() - began > args.seconds:
                print(f"no time for {held} experts", file=sys.stderr)
                continue
            some = Held(model, None if held >= shape["num_experts"] else held, shape["vocab_size"], args.quantization)
            helped = bool(some.layers) and some.layers[0].helper is not None
            for cpu in (True, False) if helped else (False,):
                if helped and not cpu:
                    some.without_cpu()
                helper = some.layers[0].helper if some.layers else None
                costs = None if helper is None else helper.costs._asdict()
                for batch in BATCHES:
                    line = {"held": held, "quantization": args.quantization, "cpu": cpu, "layers": args.layers,
                            "start_s": some.start_seconds, "costs_us": costs, "link_gb_s": link / 1e9}
                    line |= some.measured(batch, link) | {"at_s": time.perf_counter() - began}
                    print(json.dumps(line), flush=True)
                    if args.output:
                        with args.output.open("a") as file:
                            file.write(json.dumps(line) + "\n")
            some.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
