"""Measure latency, throughput, a running server or a GPU: a table, then JSON with the environment it was measured in.
`latency` and `throughput` run the engine in this process, without HTTP. `serve` drives any OpenAI-compatible server by URL.
`gpu` measures what the device itself can do."""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.cli.api import add_model
from penstock.cli.bench.environment import environment
from penstock.config.flags import Collect, Parser, add_flags, integer, listed, number
from penstock.config.schema import EngineOptions
from penstock.core.errors import ConfigError

MEASUREMENTS = {"latency": ("offline", "measure_latency", "latency_rows"),
                "throughput": ("offline", "measure_throughput", "throughput_rows"),
                "serve": ("serve", "measure_server", "rows"), "gpu": ("device", "measure_device", "rows")}
"""The module of each, its function, and the one that makes the table for people."""


def add(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="latency | throughput | serve | gpu", parser_class=Parser)
    _add_latency(kinds.add_parser("latency", help="seconds for one batch, offline"))
    _add_throughput(kinds.add_parser("throughput", help="tokens per second over many requests, offline"))
    _add_serve(kinds.add_parser("serve", help="TTFT, ITL, TPOT, E2E and goodput of a server"))
    _add_gpu(kinds.add_parser("gpu", help="memory and GEMM rates of this machine's GPU, and its clocks"))


def run(args: argparse.Namespace) -> int:
    """Measures, prints the result and saves it if asked. 1 if every request failed."""
    module, measure, rows = MEASUREMENTS[args.kind]
    home = importlib.import_module(f"penstock.cli.bench.{module}")
    result: dict[str, Any] = getattr(home, measure)(args)
    return finish(args, result, getattr(home, rows)(result))


def finish(args: argparse.Namespace, result: dict[str, Any], rows: Sequence[tuple[str, Any]]) -> int:
    """Adds metadata and environment to a result, prints it as a table and as JSON, and saves it if asked. The exit status."""
    result["metadata"] = dict(_pair(text) for text in args.metadata)
    result["environment"] = environment()
    if rows and not args.json:
        print(table(rows), end="\n\n")
    print(json.dumps(result, indent=None if args.compact else 2))
    if args.output:
        _save(args.output, result)
    return int(result.get("completed") == 0)


def table(rows: Sequence[tuple[str, Any]]) -> str:
    """Aligned lines of names and values; whole numbers with separators, others with three significant digits or one decimal."""
    width = max(len(name) for name, _ in rows)
    shown = [(name, _shown(value)) for name, value in rows]
    right = max(len(value) for _, value in shown)
    return "\n".join(f"{name:<{width}}  {value:>{right}}" for name, value in shown)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"--metadata takes KEY=VALUE, got {text!r}")
    return key, value


def _save(path: Path, result: dict[str, Any]) -> None:
    try:
        if path.suffix == ".jsonl":
            with path.open("a") as file:
                file.write(json.dumps(result) + "\n")
        else:
            path.write_text(json.dumps(result, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; the result is on the standard output") from None
    print(f"saved in {path}", file=sys.stderr)


def add_common(parser: argparse.ArgumentParser) -> None:
    """Declares what every measurement has: where the result goes, notes, the seed."""
    parser.add_argument("--output", type=Path, metavar="FILE", help="also save the result; a .jsonl file is appended to")
    parser.add_argument("--metadata", action=Collect, type=listed(), default=[], metavar="KEY=VALUE",
                        help="notes to keep with the result")
    parser.add_argument("--compact", action="store_true", help="print the JSON on one line")
    parser.add_argument("--json", action="store_true", help="print the JSON alone, without the table before it")
    parser.add_argument("--seed", type=integer, default=0, help="of prompts and arrivals (default: 0)")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_flags(parser, EngineOptions, skip=("model", "seed"))


def _add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Workload")
    group.add_argument("--num-prompts", type=integer, default=100, metavar="N", help="requests (default: 100)")
    group.add_argument("--random-input-len", type=integer, default=512, metavar="N", help="prompt tokens (default: 512)")
    group.add_argument("--random-output-len", type=integer, default=128, metavar="N", help="output tokens (default: 128)")
    group.add_argument("--random-range-ratio", type=number, default=0.0, metavar="R",
                       help="lengths are uniform in len * [1 - R, 1 + R] (default: 0)")
    group.add_argument("--random-prefix-len", type=integer, default=0, metavar="N", help="tokens that all prompts begin with")
    group.add_argument("--trace", type=Path, metavar="FILE",
                       help="lengths from a recorded trace instead: a CSV (Azure, Vidur) or JSONL (Mooncake) file")
    group.add_argument("--length-scale", type=number, default=1.0, metavar="X",
                       help="multiplies a trace's lengths (default: 1)")
    group.add_argument("--max-input-len", type=integer, metavar="N", help="cap of prompts; how many it met is reported")
    group.add_argument("--max-output-len", type=integer, metavar="N", help="cap of outputs; how many it met is reported")


def _add_latency(parser: argparse.ArgumentParser) -> None:
    _add_engine(parser)
    add_common(parser)
    parser.add_argument("--batch-size", type=integer, default=8, metavar="N", help="requests at once (default: 8)")
    parser.add_argument("--input-len", type=integer, default=32, metavar="N", help="prompt tokens (default: 32)")
    parser.add_argument("--output-len", type=integer, default=128, metavar="N", help="output tokens (default: 128)")
    parser.add_argument("--num-iters", type=integer, default=10, metavar="N", help="measured repetitions (default: 10)")
    parser.add_argument("--num-iters-warmup", type=integer, default=2, metavar="N", help="repetitions before (default: 2)")
    _add_profile(parser)


def _add_throughput(parser: argparse.ArgumentParser) -> None:
    _add_engine(parser)
    add_common(parser)
    _add_workload(parser)
    _add_profile(parser)


def _add_gpu(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu (default: cuda)")
    parser.add_argument("--size", type=integer, metavar="N",
                        help="width of the GEMM's square matrices (default: 8192, on a CPU 1024)")


def _add_profile(parser: Any) -> None:
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="also write Chrome traces of runs of their own there")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    _add_workload(parser)
    target = parser.add_argument_group("Server")
    target.add_argument("--url", default="http://127.0.0.1:8000", help="its address (default: http://127.0.0.1:8000)")
    target.add_argument("--model", metavar="NAME", help="name to ask for (default: the server's first)")
    target.add_argument("--api-key", metavar="KEY", help="by default PENSTOCK_API_KEY or OPENAI_API_KEY from the environment")
    target.add_argument("--endpoint", choices=("completions", "chat"), default="completions", help="(default: completions)")
    target.add_argument("--prompt", choices=("ids", "text"), help="token ids or words; by default ids for completions")
    target.add_argument("--vocab-size", type=integer, default=256, metavar="N",
                        help="token ids are drawn from [3, N); the default, 256, suits any model")
    target.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True,
                        help="outputs have the length asked for (default: yes)")
    target.add_argument("--temperature", type=number, default=0.0, help="(default: 0)")
    target.add_argument("--extra-body", type=json.loads, default={}, metavar="JSON", help="more fields for every request")
    load = parser.add_argument_group("Load")
    load.add_argument("--request-rate", type=float, default=float("inf"), metavar="R",
                      help="requests per second, as a Poisson process; by default all at once")
    load.add_argument("--burstiness", type=number, default=1.0, metavar="B",
                      help="shape of the gamma-distributed gaps: 1 is Poisson, less is burstier (default: 1)")
    load.add_argument("--max-concurrency", type=integer, metavar="N", help="closed loop: at most N requests in flight")
    load.add_argument("--use-trace-arrivals", action="store_true", help="requests arrive when the trace says")
    load.add_argument("--time-scale", type=number, default=1.0, metavar="X", help="stretches the trace's gaps (default: 1)")
    load.add_argument("--num-warmups", type=integer, default=1, metavar="N", help="unmeasured requests first (default: 1)")
    figures = parser.add_argument_group("Figures")
    figures.add_argument("--goodput", action=Collect, type=listed(), default=[], metavar="NAME:MS,...",
                         help="count requests per second that meet all of these: ttft:200,tpot:50,e2el:5000,itl:100")
    figures.add_argument("--metric-percentiles", default="50,90,95,99", metavar="P,...", help="(default: 50,90,95,99)")
    figures.add_argument("--save-detailed", action="store_true", help="also report every request's times and text")
    figures.add_argument("--quiet", action="store_true", help="no progress bar")
