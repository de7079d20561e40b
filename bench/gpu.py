"""One GPU's figures for the fixed workloads, table by table, each figure beside its floor, its target and vLLM's.

usage: python bench/gpu.py [--tables workloads,invariant | all] [--shape llama8b] [--output FILE.json] ...; --help lists all

Every table has an engine of its own, one after another in this process; starts and servers are processes of their own.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import gpu_curves
import timeline
from fixed import (
    COPY,
    LONG_PROMPTS,
    LONG_STEPS,
    PEER,
    SHAPES,
    TARGET,
    Ask,
    as_peer,
    floor,
    step_bytes,
    step_floor,
    workloads,
    write,
)
from penstock.cli.bench import add_common, finish, offline
from penstock.cli.bench.offline import seconds_for
from penstock.config.flags import Collect, Parser, add_flags, from_args, integer, listed, number
from penstock.config.schema import EngineOptions
from penstock.core.errors import ConfigError, PenstockError
from penstock.platform.facts import detect

TABLES = {
    "workloads": "the fixed workloads: seconds, floor, target, peer",
    "long": "decode steps at contexts of 32k and 128k, as a part of the copy's rate",
    "prompts": "prompts of 32k and 120k, and decode steps behind them: seconds, target, peer",
    "processes": "short decodes in many processes, alone and beside busy neighbours: how the seconds are distributed",
    "curve": "decode steps over batch sizes and contexts, with their floors",
    "invariant": "what the batch-invariant mode costs on the workloads",
    "eager": "steps with CUDA graphs and without, below and beyond the largest graph",
    "memory": "memory predicted and measured, eleven configurations",
    "soak": "random lengths at the defaults until --soak seconds are over",
    "start": "seconds from exec to the first token, and what is compiled after ready",
    "http": "closed loops over HTTP, and seconds from exec to ready",
}
LONG = ((32768, 1), (32768, 8), (131000, 1), (131000, 8))
"""(context, batch) of the long-context decodes."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (512, 2048, 8192, 32768)
"""Of the curve, as far as they are no more than `_MOST` tokens together: the prompts of a point must be computed once."""
_MOST = 1 << 18
ROWS = (1, 8, 64, 256, 480, 512, 513, 640, 1024)
TOKENS = (16, 128, 256, 257, 512, 1024, 2048, 2049, 3072)
"""Of the comparison with steps without graphs: rows of decode steps, behind `_SHORT` tokens each, and tokens of a prompt's."""
_SHORT = 128
_STEPS = 32
"""Decode steps that a point of a curve is the mean of."""
_BEFORE = 18
"""Tokens of every answer before them, so that the first to begin still runs when the last of a thousand has begun: requests are
handed over some a turn."""
_USUAL_LENGTH = 16384
"""The context that the peer was run with; a longer one only for the tables that need it."""


def measure_gpu(args: argparse.Namespace) -> dict[str, Any]:
    """The tables that were asked for; they go to the standard error as they grow."""
    known = [name for name, _ in workloads(next(iter(SHAPES)))]
    for what, asked, possible in (("shape", args.shape, list(SHAPES)), ("workload", args.workload, known),
                                  ("table", args.tables, [*TABLES, "all"])):
        unknown = [name for name in asked if name not in possible]
        if unknown:
            raise ConfigError(f"{what} {unknown[0]!r} is not known; possible are {', '.join(possible)}")
    detect(args.device)  # no GPU: said at once, and not measured on a CPU instead
    wanted = set(TABLES) if "all" in args.tables else set(args.tables)
    result: dict[str, Any] = {"shapes": {name: _shape(name, wanted, args) for name in args.shape}}
    # Late: these import torch, which --help need not.
    if wanted & {"memory", "soak"}:
        import gpu_memory

        if "memory" in wanted:
            result["memory"] = gpu_memory.table(_say)
        if "soak" in wanted:
            result["soak"] = gpu_memory.soaked(args.soak, args.seed, _say)
    # After all that is timed in this process: launches take longer where a profiler has run.
    for name in args.shape if args.profile else []:
        with _bench(name, args) as bench:
            result["shapes"][name]["profile"] = bench.profile(args.profile)
    if "start" in wanted:
        from gpu_starts import starts

        result["start"] = [one for name in args.shape for one in starts(name, _say)]
    if "processes" in wanted:
        from gpu_processes import processes

        result["processes"] = [processes(name, args.processes, args.draw, _say) for name in args.shape if name in PEER]
    if "http" in wanted:
        from gpu_http import over_http

        result["http"] = [one for name in args.shape for one in over_http(name, args.concurrency, args.client, _say)]
    return result


def _shape(name: str, wanted: set[str], args: argparse.Namespace) -> dict[str, Any]:
    """The tables of one shape that are made offline."""
    result: dict[str, Any] = {}
    if "prompts" in wanted and name in LONG_PROMPTS:
        with _bench(name, args, longest=True) as bench:
            result["prompts"] = bench.long_prompts()
    if name not in PEER:
        return result
    if wanted & {"workloads", "invariant"}:
        with _bench(name, args) as bench:
            result |= bench.facts()
            result["workloads"] = bench.workloads()
    if "invariant" in wanted:
        with _bench(name, args, batch_invariant=True) as bench:
            result["invariant"] = bench.workloads(result["workloads"])
    if "eager" in wanted:
        with _bench(name, args) as bench:
            usual = bench.shapes_of_steps()
        with _bench(name, args, enforce_eager=True) as bench:
            result["eager"] = bench.shapes_of_steps(usual)
    if wanted & {"long", "curve"}:
        with _bench(name, args, longest=True) as bench:
            if "long" in wanted:
                result["long"] = bench.steps(LONG)
            if "curve" in wanted:
                result["curve"] = bench.steps([(context, batch) for context in CONTEXTS for batch in BATCHES
                                               if context * batch <= _MOST])
                if args.draw:
                    args.draw.mkdir(parents=True, exist_ok=True)
                    (args.draw / f"gpu_curve_{name}.svg").write_text(gpu_curves.draw(name, result["curve"]))
    return result


@contextmanager
def _bench(name: str, args: argparse.Namespace, longest: bool = False, **changes: Any) -> Iterator[_Bench]:
    """An engine for as long as the block lasts. longest: with the shape's whole context, if the user does not say."""
    from penstock.engine.llm import LLM  # brings torch, which --help need not

    with tempfile.TemporaryDirectory() as folder:
        model = write(SHAPES[name], Path(folder) / name)
        options = asdict(from_args(args, EngineOptions, model=str(model), skip_tokenizer_init=True))
        if options["max_model_len"] is None and not longest:
            options["max_model_len"] = min(_USUAL_LENGTH, SHAPES[name]["max_position_embeddings"])
        start = time.perf_counter()
        with as_peer() if args.peer_weights else nullcontext(), LLM(**options | changes) as llm:
            yield _Bench(name, args, llm, time.perf_counter() - start)


class _Bench:
    """One shape's engine and what is measured on it."""

    def __init__(self, name: str, args: argparse.Namespace, llm: Any, start_seconds: float) -> None:
        self.name, self.args, self.llm = name, args, llm
        self.start_seconds = start_seconds

    def facts(self) -> dict[str, Any]:
        info = self.llm.info
        _say(f"{self.name}: ready in {self.start_seconds:.1f} s, {info.kv_tokens:,} KV tokens, "
             f"{info.graphs} graphs in {info.graph_seconds:.1f} s, {info.compiled} kernels in {info.compile_seconds:.1f} s")
        return {"start_seconds": round(self.start_seconds, 2), "kv_tokens": info.kv_tokens,
                "memory": {"weights": info.weight_bytes, "step": info.step_bytes, "graphs": info.graph_bytes,
                           "kv": info.kv_bytes},
                "graphs": info.graphs, "graph_seconds": info.graph_seconds, "compiled": info.compiled,
                "compile_seconds": info.compile_seconds, "kernels": dict(info.kernels)}

    def workloads(self, usual: dict[str, Any] | None = None) -> dict[str, Any]:
        """Each workload's seconds; beside the `usual` ones, if they are given, as a share of throughput that is lost."""
        _say(f"  {'workload':16} {'seconds':>8} " + ("usual     cost" if usual else "   floor   target     peer   of peer"))
        found = {}
        for name, asks in workloads(self.name):
            wanted = self.args.workload or PEER[self.name].keys() | TARGET[self.name].keys()
            if name not in wanted:
                continue
            seconds = self._seconds(name, asks)
            median = statistics.median(seconds)
            found[name] = entry = {"seconds": median, "all": seconds}
            if usual is not None:
                entry["cost"] = 1 - usual[name]["seconds"] / median
                _say(f"  {name:16} {median:8.4f} {usual[name]['seconds']:8.4f} {entry['cost']:6.1%}")
                continue
            target, peer = (known[self.name].get(name, float("nan")) for known in (TARGET, PEER))
            entry |= {"floor": floor(self.name, asks, self.llm.info.max_num_seqs), "target": target, "peer": peer}
            mark = "" if median <= target else "  over the target"
            _say(f"  {name:16} {median:8.4f} {entry['floor']:8.4f} {target:8.3f} {peer:8.4f}   {median / peer:6.3f}{mark}")
        return found

    def _seconds(self, name: str, asks: list[Ask]) -> list[float]:
        """Of one run after a short one for the long workload, else of `repeats` runs after one that warms up."""
        if name.startswith("offline"):
            self._run(asks[:32])
            return [self._run(asks)]
        return [self._run(asks, fresh=not name.startswith("prefix")) for _ in range(self.args.repeats + 1)][1:]

    def _run(self, asks: list[Ask], fresh: bool = True) -> float:
        """Seconds until all are answered in full; fresh: nothing is found that was computed before."""
        if fresh:
            self.llm.reset_prefix_cache()
        return seconds_for(self.llm, [(ask.prompt, ask.output) for ask in asks])

    def long_prompts(self) -> list[dict[str, Any]]:
        """The shape's long prompts and decode steps behind long contexts. The tokens of a prompt are new each time."""
        draw, vocab = random.Random(self.args.seed), SHAPES[self.name]["vocab_size"]

        def asks(batch: int, context: int, output: int) -> list[Ask]:
            return [Ask(draw.choices(range(vocab // 8, vocab // 8 * 7), k=context), output) for _ in range(batch)]

        found = []
        for context, batch, target, peer in LONG_PROMPTS[self.name]:
            seconds = [self._run(asks(batch, context, 1)) for _ in range(self.args.repeats + 1)][1:]
            found.append({"context": context, "batch": batch, "seconds": statistics.median(seconds), "all": seconds,
                          "target": target, "peer": peer})
            self._say_long("prompt", found[-1]["seconds"], "s", context, batch, target, peer)
        for context, batch, target, peer in LONG_STEPS.get(self.name, ()):
            step = self._step(context, batch)
            found.append(step | {"target": target, "peer": peer})
            self._say_long("decode step", step["milliseconds"], "ms", context, batch, target, peer)
        return found

    @staticmethod
    def _say_long(what: str, value: float, unit: str, context: int, batch: int, target: float, peer: float) -> None:
        mark = "" if value <= target else "  over the target"
        _say(f"  {what} of {context:,} x {batch}: {value:.3f} {unit} (target {target}, peer {peer}){mark}")

    def steps(self, points: Iterable[tuple[int, int]]) -> list[dict[str, Any]]:
        """Decode steps at (context, batch) points; contexts are cut to what the model and the cache have room for, by no more
        than a half for the cache's sake."""
        info, places = self.llm.info, list[tuple[int, int]]()
        for context, batch in points:
            wanted = min(context, info.max_model_len - _BEFORE - _STEPS - 8)
            room = info.kv_tokens // batch - _BEFORE - _STEPS - info.page_size
            if batch <= info.max_num_seqs and 2 * room >= wanted:
                places.append((min(wanted, room), batch))
        return [self._step(context, batch) for context, batch in dict.fromkeys(places)]

    def _step(self, context: int, batch: int) -> dict[str, Any]:
        """A decode step at a context length: the difference of two runs that differ by `_STEPS` steps."""
        vocab = SHAPES[self.name]["vocab_size"]
        low = min(100, vocab // 4)
        # Equal prompts but for a first token each: what is computed once serves the other runs.
        asks = [[Ask([(low + row) % vocab, *(low + i * 7919 % (vocab - low) for i in range(context - 1))], output)
                 for row in range(batch)] for output in (_BEFORE, _BEFORE + _STEPS)]
        self._run(asks[0])
        short, long = (min(self._run(each, fresh=False) for _ in range(2)) for each in asks)
        seconds = (long - short) / _STEPS
        middle = context + _BEFORE - 1 + _STEPS // 2
        moved, least = step_bytes(self.name, batch, middle), step_floor(self.name, batch, middle)
        _say(f"  decode at {context:7,} x {batch:3}: {seconds * 1e3:8.3f} ms (floor {least * 1e3:.3f}), "
             f"{batch / seconds:9,.0f} tokens/s, {moved / seconds / COPY:5.1%} of the copy's rate")
        return {"context": context, "batch": batch, "milliseconds": seconds * 1e3, "floor_milliseconds": least * 1e3,
                "tokens_per_second": batch / seconds, "bytes": moved, "of_copy": moved / seconds / COPY}

    def shapes_of_steps(self, usual: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
        """Milliseconds of decode steps by rows and of a prompt's single step by tokens; beside the `usual` ones of an engine
        with graphs, if they are given."""
        found = [{"rows": point["batch"], "milliseconds": point["milliseconds"]}
                 for point in self.steps([(_SHORT, rows) for rows in ROWS])]
        vocab = SHAPES[self.name]["vocab_size"]
        for tokens in TOKENS:
            if tokens < min(self.llm.info.max_model_len, self.llm.info.max_num_batched_tokens):
                ask = Ask([i * 7919 % vocab for i in range(tokens)], 1)
                seconds = [self._run([ask]) for _ in range(self.args.repeats + 1)][1:]
                found.append({"tokens": tokens, "milliseconds": statistics.median(seconds) * 1e3})
        for entry in found if usual is not None else ():
            what = next(name for name in ("rows", "tokens") if name in entry)
            entry["with_graphs"] = next(one["milliseconds"] for one in usual or () if one.get(what) == entry[what])
            _say(f"  step of {entry[what]} {what}: {entry['with_graphs']:.3f} ms with graphs, "
                 f"{entry['milliseconds']:.3f} without")
        return found

    def profile(self, folder: Path) -> dict[str, Any]:
        """Chrome traces of decoding at batch 1 and 32, and what they say of the GPU's idle time."""
        folder.mkdir(parents=True, exist_ok=True)
        found = {}
        for batch in (1, 32):
            asks = [Ask([100 + i, *range(200, 327)], 40) for i in range(batch)]
            self._run(asks)
            trace = folder / f"{self.name}-decode-{batch}.json"
            offline.traced(partial(self._run, asks), trace)
            found[f"decode_b{batch}"] = shown = timeline.timeline(trace)
            between = f", {shown['between_share']:.1%} between steps" if shown["steps"] else ""
            _say(f"  profile of decoding at batch {batch}: GPU idle {shown['idle_share']:.1%} of the time{between}")
            if self.args.draw and "gaps" in shown:
                self.args.draw.mkdir(parents=True, exist_ok=True)
                picture = timeline.draw(shown, f"{self.name}, decoding at batch {batch}")
                (self.args.draw / f"gpu_gaps_{self.name}_b{batch}.svg").write_text(picture)
        return found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> Parser:
    parser = Parser(prog="bench/gpu.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser)
    add_flags(parser, EngineOptions, skip=("model", "seed"))
    parser.set_defaults(load_format="dummy", gpu_memory_utilization=0.85, device="cuda")
    group = parser.add_argument_group("Tables")
    group.add_argument("--tables", action=Collect, type=listed(), default=["workloads"], metavar="NAME,...",
                       help=f"{', '.join(TABLES)}, or all (default: workloads)")
    group.add_argument("--shape", action=Collect, type=listed(), default=["llama8b", "qwen06b"], metavar="NAME,...",
                       help="(default: llama8b,qwen06b)")
    group.add_argument("--workload", action=Collect, type=listed(), default=[], metavar="NAME,...",
                       help="only these of the workloads")
    group.add_argument("--repeats", type=integer, default=3, metavar="N", help="runs after the one that warms up (default: 3)")
    group.add_argument("--processes", type=integer, default=30, metavar="N",
                       help="processes of the table of that name (default: 30)")
    group.add_argument("--soak", type=number, default=60.0, metavar="SECONDS", help="length of the soak (default: 60)")
    group.add_argument("--concurrency", action=Collect, type=listed(integer), default=[1, 32, 256], metavar="N,...",
                       help="requests at once over HTTP (default: 1,32,256)")
    group.add_argument("--client", type=Path, metavar="FILE",
                       help="script that loads the server instead of `penstock bench serve` (bench/gpu_http.py)")
    group.add_argument("--peer-weights", action="store_true", help="weights as vLLM's dummy ones are at work, with which the "
                       "peer's figures were taken: routers that pick the same experts for every token, 4-bit codes of zero")
    group.add_argument("--draw", type=Path, metavar="FOLDER", help="draw the curve, and the gaps of --profile, as SVG there")
    group.add_argument("--profile", type=Path, metavar="FOLDER", help="also write Chrome traces of runs of their own there")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """The exit status; what is wrong is one line on the standard error."""
    args = _parser().parse_args(words)
    try:
        return finish(args, measure_gpu(args), [])
    except PenstockError as error:
        print(f"bench/gpu.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
