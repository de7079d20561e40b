"""Decoding with part of the layers' matrices outside of the device's memory: tokens a second beside the link's floor.

usage: python bench/offload.py [--shape llama8b] [--parts 0,0.5,1,0.5e,0.5d,0.25,0.75] [--seconds S] [--output FILE.jsonl]

A part is the share of layers that are away (`--offload-weights`); with `e` behind it steps are not captured as CUDA graphs,
with `d` the matrices are in a file (in `--folder`, by default the system's temporary folder). Weights are random, but the
same in each part, so greedy tokens must equal those of the first part. A step cannot be shorter than the copy of the bytes
that are away; their rate is that of large copies of pinned memory, measured first. No part begins after S seconds."""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from experts_held import link_bytes_per_second
from fixed import SHAPES, write
from layouts import SMALL
from penstock.cli.bench.environment import environment
from penstock.config.schema import EngineOptions
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.engine.engine import Engine

BATCHES = (1, 32, 256)
PROMPT, TOKENS = 32, 12
"""Tokens of a sequence's prompt and answer."""


def bytes_away(engine: Engine) -> int:
    """Bytes of matrices that each step copies to the device."""
    model = engine.rank._worker.model  # type: ignore[attr-defined]
    return sum(part.kept.nbytes for parts in model._away._parts.values() for part in parts) if model._away else 0


class Part:
    """An engine with some layers away."""

    def __init__(self, model: Path, shape: dict[str, Any], part: str, device: str, folder: str) -> None:
        """`part` as on the command line. A share of 0: no layer is away."""
        share = float(part.rstrip("ed"))
        more: dict[str, Any] = {} if share == 0 else {"offload_weights": str(share)}
        if part.endswith("d"):
            more["offload_folder"] = folder
        self.vocabulary = shape["vocab_size"]
        begin = time.perf_counter()
        self.engine = Engine(EngineOptions(
            model=str(model), load_format="dummy", device=device, skip_tokenizer_init=True, max_model_len=1024,
            max_num_seqs=max(BATCHES), max_num_batched_tokens=max(BATCHES) * PROMPT, enable_prefix_caching=False,
            kv_cache_memory_bytes=1 << (33 if device == "cuda" else 28), enforce_eager=part.endswith("e"), **more))
        self.start_seconds = time.perf_counter() - begin
        self.bytes = bytes_away(self.engine)

    def run(self, batch: int, tokens: int) -> tuple[float, dict[str, list[int]]]:
        """Milliseconds of a step, median, after each of `batch` sequences has two tokens; and their greedy tokens."""
        drawn = random.Random(batch)
        for name in range(batch):
            prompt = [drawn.randrange(100, self.vocabulary - 100) for _ in range(PROMPT)]
            self.engine.submit(Request(str(name), prompt, SamplingParams(
                temperature=0, max_tokens=tokens, ignore_eos=True, seed=0)))
        answers, times = defaultdict[str, list[int]](list), []
        while self.engine.busy:
            began = time.perf_counter()
            found = self.engine.turn()
            for update in found:
                answers[update.request_id] += update.token_ids
            if len(found) == batch and all(len(answers[update.request_id]) > 2 for update in found):
                times.append(time.perf_counter() - began)
        return statistics.median(times) * 1e3, dict(answers)

    def close(self) -> None:
        self.engine.close()
        del self.engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama8b", choices=sorted(SHAPES | SMALL))
    parser.add_argument("--parts", default="0,0.5,1,0.5e,0.5d,0.25,0.75")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="of the file of a part with `d`")
    parser.add_argument("--seconds", type=float, default=150.0, help="no part begins later")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    shape, began = (SHAPES | SMALL)[args.shape], time.perf_counter()
    link = link_bytes_per_second() if args.device == "cuda" else None
    first: dict[int, dict[str, list[int]]] = {}
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        model = write(shape, Path(folder) / "model")
        for part in args.parts.split(","):
            if time.perf_counter() - began > args.seconds:
                print(f"no time for {part}", file=sys.stderr)
                continue
            made = Part(model, shape, part, args.device, args.folder)
            for batch in BATCHES:
                made.run(batch, 4)
                step, answers = made.run(batch, TOKENS)
                expected = first.setdefault(batch, answers)
                pairs = [one == other for name in expected for one, other in zip(expected[name], answers[name], strict=True)]
                wrong += len(pairs) - sum(pairs)
                floor = made.bytes / link * 1e3 if link else None
                line = {"environment": environment(), "shape": args.shape, "part": part, "sequences": batch, "step_ms": step,
                        "tokens_s": batch / step * 1e3, "bytes_away": made.bytes, "link_gb_s": link and link / 1e9,
                        "floor_ms": floor, "same_tokens": sum(pairs), "of": len(pairs), "start_s": made.start_seconds}
                print(json.dumps({name: value for name, value in line.items() if name != "environment"}), flush=True)
                if args.output:
                    with args.output.open("a") as file:
                        file.write(json.dumps(line) + "\n")
            made.close()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
