"""Speculative decoding with an imposed acceptance: tokens a second beside those without drafts, on a GPU or a CPU.

usage: python bench/speculation.py [--target llama8b] [--draft eagle] [--batches 1,8,32,128,256] [--output FILE.json]

The weights are random, so no draft would ever be right. Drafts are kept with a given probability instead
(`synthetic_acceptance_rate`); everything else runs as it does in service: the drafter, its cache, verification, overlap and
graphs. Beside each load stand the bound of a round (`bound`: tokens if drafts were free; `bound_read`: if steps and drafts took
only the time in which their weights are read) and the time of one further draft beside that in which its weights are read.
`--draft eagle` is an EAGLE-3 head of the target's shape, `layer` a model of one of its layers; others are shapes.
With `--ahead DEVICE` the draft model drafts ahead on that device, and "off" is the same model that drafts in turn.
Off and on take turns, so that a machine that becomes slower or faster meanwhile does so for both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fixed import SHAPES, write
from gpu_time import copy_bandwidth
from penstock.cli.bench.environment import environment
from penstock.cli.bench.offline import seconds_for
from penstock.engine.llm import LLM
from penstock.models.eagle_module import Eagle
from penstock.scheduler.drafting import Adaptive, DraftPolicy
from penstock.worker.drafters.model import Chain

PROMPT = 64
SMALL: dict[str, dict[str, Any]] = {
    "llama1b": SHAPES["llama8b"] | {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
                                    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32000,
                                    "rope_theta": 10000.0, "max_position_embeddings": 2048, "bos_token_id": 1,
                                    "eos_token_id": 2}}
SMALL["llama60m"] = SMALL["llama1b"] | {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8,
                                        "num_attention_heads": 8}
"""TinyLlama's shape of 1.1B, and one of 60M with its vocabulary."""


def head(shape: dict[str, Any], folder: Path) -> Path:
    """Writes an EAGLE-3 head for a shape."""
    config = {"head_dim": shape["hidden_size"] // shape["num_attention_heads"], **shape}
    layers, tokens = shape["num_hidden_layers"], torch.arange(min(32000, shape["vocab_size"]))
    Eagle.fresh(config, [2, layers // 2, layers - 3], tokens, torch.randn(len(tokens), shape["hidden_size"])).save(folder)
    return folder


def expected(probability: float, drafts: int) -> float:
    """Tokens a step."""
    return sum(probability ** place for place in range(drafts + 1))


def read_bytes(shape: dict[str, Any], layers: int, vocab: int, joined: int = 1) -> int:
    """Bytes in bfloat16 of the matrices that a pass over so many layers and a vocabulary reads. `joined`: states of the model's
    width that attention reads side by side (2 in an EAGLE-3 head)."""
    width, heads = shape["hidden_size"], shape["num_attention_heads"]
    each = shape.get("head_dim") or width // heads
    attention = joined * width * each * (heads + 2 * shape["num_key_value_heads"]) + each * heads * width
    return 2 * (layers * (attention + 3 * width * shape["intermediate_size"]) + vocab * width)


def copy_rate(device: torch.device) -> float:
    """Bytes a second that a copy reads and writes together."""
    if device.type == "cuda":
        return copy_bandwidth()
    source = torch.zeros(1 << 27, dtype=torch.uint8)
    copy, best = torch.zeros_like(source), 0.0
    for _ in range(8):
        start = time.perf_counter()
        for _ in range(4):
            copy.copy_(source)
        best = max(best, 8 * source.numel() / (time.perf_counter() - start))
    return best


class Passes:
    """The time of the passes that draft the tokens behind the first, on the device."""

    def __init__(self) -> None:
        self.marks: list[tuple[Any, Any, int]] = []

    def each(self) -> float | None:
        """Seconds a pass, its preparation included; None: there was none. Forgets them."""
        marks, self.marks = self.marks, []
        if not marks:
            return None
        if isinstance(marks[0][0], float):
            return float(sum(end - begin for begin, end, _ in marks)) / sum(count for *_, count in marks)
        torch.cuda.synchronize()
        return sum(begin.elapsed_time(end) for begin, end, _ in marks) / 1e3 / sum(count for *_, count in marks)


@contextmanager
def watched() -> Iterator[Passes]:
    """Measures all chains of passes while it lasts."""
    run, found = Chain.run, Passes()

    def mark(device: torch.device) -> Any:
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def timed(self: Chain, plan: Any, picked: Any, passes: Any, *others: Any) -> None:
        count, device = int(passes.max(initial=0)), self._runner.builder.device
        begin = mark(device)
        run(self, plan, picked, passes, *others)
        if count:
            found.marks.append((begin, mark(device), count))

    Chain.run = timed  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Chain.run = run  # type: ignore[method-assign]


def seconds(llm: LLM, batch: int, output: int, turn: int) -> float:
    llm.reset_prefix_cache()
    return seconds_for(llm, [(np.random.default_rng(1000 * turn + i).integers(10, 1000, PROMPT).tolist(), output)
                             for i in range(batch)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="llama8b")
    parser.add_argument("--draft", default="eagle")
    parser.add_argument("--batches", default="1,8,32,128,256")
    parser.add_argument("--acceptance", default="0.8,0.6,0")
    parser.add_argument("--policies", default="fixed,adaptive")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--turns", type=int, default=3, help="measured pairs; the first one besides warms up")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--ahead", help="cuda:1, cpu: drafts ahead there, against drafts in turn")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    batches = [int(part) for part in args.batches.split(",")]
    shapes, lines = SHAPES | SMALL, list[dict[str, Any]]()
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": PROMPT + args.output_len + 64,
               "max_num_seqs": max(batches), "device": args.device}
    device = torch.device("cuda" if args.device == "auto" and torch.cuda.is_available() else
                          args.device if args.device != "auto" else "cpu")
    rate, of_head = copy_rate(device), args.draft in ("eagle", "layer")
    with tempfile.TemporaryDirectory() as name, watched() as passes:
        folder, shape = Path(name), shapes[args.target]
        target = str(write(shape, folder / args.target))
        drafter = head(shape, folder / "draft") if args.draft == "eagle" else write(
            {**shape, "num_hidden_layers": 1} if args.draft == "layer" else
            {**shapes[args.draft], "vocab_size": shape["vocab_size"]}, folder / "draft")
        small = shape if of_head else shapes[args.draft]
        draft_s = read_bytes(small, 1 if of_head else small["num_hidden_layers"], min(32000, shape["vocab_size"])
                             if args.draft == "eagle" else shape["vocab_size"], 1 + (args.draft == "eagle")) / rate
        target_s = read_bytes(shape, shape["num_hidden_layers"], shape["vocab_size"]) / rate
        for probability in map(float, args.acceptance.split(",")):
            config = {"model": str(drafter), "num_speculative_tokens": args.drafts, "rejection_sample_method": "synthetic",
                      "synthetic_acceptance_rate": probability}
            ahead = {"ahead": True, "device": args.ahead} if args.ahead else {}
            in_turn = {"speculative_config": {**config, "draft_policy": "fixed"}} if ahead else {}
            # The share of a GPU's memory is that of all its users: a second engine with the same share would have few pages.
            with (LLM(target, gpu_memory_utilization=0.45, **in_turn, **options) as off,
                  LLM(target, gpu_memory_utilization=0.9, speculative_config={**config, **ahead}, **options) as on):
                scheduler = on.engine.scheduler
                for kind in args.policies.split(",") if probability else ["adaptive"]:
                    scheduler.drafts.policy = (Adaptive(args.drafts, scheduler.times) if kind == "adaptive"
                                               else DraftPolicy(args.drafts))
                    for batch in batches:
                        before, _ = on.engine.stats().drafted_tokens, passes.each()
                        pairs = [(seconds(off, batch, args.output_len, turn), seconds(on, batch, args.output_len, turn))
                                 for turn in range(1 + args.turns)][1:]
                        plain, took = (statistics.median(side) for side in zip(*pairs, strict=True))
                        stats, each = on.engine.stats(), passes.each()
                        tokens = expected(probability, args.drafts)
                        lines.append({"acceptance": probability, "policy": kind, "batch": batch, "plain_s": round(plain, 4),
                                      "s": round(took, 4),
                                      "speedup": round(statistics.median(one / other for one, other in pairs), 3),
                                      "bound": round(tokens, 2),
                                      "bound_read": round(tokens / (1 + args.drafts * draft_s / target_s), 2),
                                      "draft_us": None if each is None else round(1e6 * each, 1),
                                      "draft_floor_us": round(1e6 * draft_s, 1),
                                      "drafted": stats.drafted_tokens - before,
                                      "hits": stats.ahead_hits, "tries": stats.ahead_tries})
                        print(lines[-1], flush=True)
    if args.output is not None:
        args.output.write_text(json.dumps({"environment": environment(), "target": args.target, "draft": args.draft,
                                           "copy_rate": round(rate), "lines": lines}, indent=1))


if __name__ == "__main__":
    main()
