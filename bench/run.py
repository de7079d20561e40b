"""The standing measurements: decoding at several batch sizes, prefill, and streams over HTTP, of a shape with random weights.

usage: run.py [--shape llama15m | llama1b | qwen06b | llama8b] [--output FILE.jsonl] [--quick] [-- ENGINE FLAGS]

Each measurement is one `penstock bench` in a process of its own; its record (with the environment) is one line of the
output, bench/results/<shape>.jsonl unless told otherwise. A table is printed as it goes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_http import server
from shapes import SHAPES, write

PENSTOCK = [sys.executable, "-m", "penstock"]
RESULTS = Path(__file__).parent / "results"


def offline(kind: str, model: Path, flags: list[str], *words: object) -> dict[str, Any]:
    """One offline measurement's record."""
    return measure("bench", kind, model, *words, "--load-format", "dummy", *flags)


def measure(*words: object) -> dict[str, Any]:
    done = subprocess.run([*PENSTOCK, *map(str, words), "--compact"], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def records(model: Path, vocab: int, quick: bool, flags: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, record) of every measurement."""
    out, repeats = (16, 2) if quick else (64, 5)
    for batch in (1, 8) if quick else (1, 4, 8, 16, 32):
        yield f"decode batch {batch}", offline(
            "latency", model, flags, "--batch-size", batch, "--input-len", 32, "--output-len", out, "--num-iters", repeats,
            "--num-iters-warmup", 1)
    yield "prefill 512", offline("throughput", model, flags, "--num-prompts", 2 if quick else 8,
                                 "--random-input-len", 512, "--random-output-len", 1)
    with server(model, flags) as (address, _):
        for streams in (8,) if quick else (1, 16, 64):
            yield f"http {streams} streams", measure(
                "bench", "serve", "--url", address, "--num-prompts", streams * (1 if quick else 3),
                "--max-concurrency", streams, "--random-input-len", 32, "--random-output-len", out, "--vocab-size", vocab,
                "--quiet", "--extra-body", '{"return_token_ids": true}')


def row(name: str, record: dict[str, Any]) -> str:
    """A line of the table."""
    rate = record.get("output_tokens_per_second") or record.get("output_throughput") or 0.0
    if name.startswith("prefill"):
        rate = record["total_input_tokens"] / record["elapsed_time"]
    step = record.get("engine", {})
    detail = f"step {step['worker_ms_per_step']:.2f} ms, overhead {step['overhead_ms_per_step']:.3f} ms" if step else \
        f"ttft {record['median_ttft_ms']:.1f} ms, itl {record['median_itl_ms']:.2f} / p99 {record['p99_itl_ms']:.2f} ms"
    return f"{name:<18} {rate:>10,.1f} tokens/s   {detail}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama15m")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--quick", action="store_true", help="few and short measurements, to see that all works")
    parser.add_argument("flags", nargs="*", help="flags of the engine, after --")
    args = parser.parse_args()
    output = args.output or RESULTS / f"{args.shape}.jsonl"
    output.parent.mkdir(parents=True, exist_ok=True)
    table = []
    with tempfile.TemporaryDirectory() as folder, output.open("a") as file:
        model, vocab = write(args.shape, Path(folder)), SHAPES[args.shape]["vocab_size"]
        for name, record in records(model, vocab, args.quick, args.flags):
            file.write(json.dumps({"name": name, "shape": args.shape, **record}) + "\n")
            file.flush()
            table.append(row(name, record))
            print(table[-1], flush=True)
    print(f"\nrecords in {output}")


if __name__ == "__main__":
    main()
