"""Sampling's time on a GPU, beside one reading of the logits and PyTorch's own way (sort, softmax, multinomial).

usage: gpu_sampler.py [--lines 1,8,32,128,256] [--scale 1] [--json FILE]

Times are medians over CUDA graphs of several runs each. Logits are normal, times --scale: at 1 they are flatter than of models
(top_p 0.9 keeps 40 % of the vocabulary), at 4 more like those. The floor is the bytes of the logits over the bandwidth of a
device-to-device copy, taken first. In brackets, what the host needs for `Sampler.launch`, eagerly. Prints a table; the record
goes to --json or $OUT.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_time import copy_bandwidth, graph_us
from penstock.cli.bench.environment import environment
from penstock.core.plan import Enter, StepPlan
from penstock.core.sampling import SamplingParams
from penstock.ops.sample_table import Feature
from penstock.ops.sample_triton import TritonSample
from penstock.worker.rows import Rows
from penstock.worker.sampler import LogitsRows, Sampler

VOCABULARIES = {"llama8b": 128256, "qwen06b": 151936}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0}, "random": {}, "top_k 50": {"top_k": 50}, "top_p 0.9": {"top_p": 0.9},
    "qwen (0.6, 20, 0.95)": {"temperature": 0.6, "top_k": 20, "top_p": 0.95}, "min_p 0.05": {"min_p": 0.05},
    "top_k 30000, top_p 0.9": {"top_k": 30000, "top_p": 0.9}, "penalties": {"temperature": 0.0, "repetition_penalty": 1.1},
    "logprobs 20": {"temperature": 0.0, "logprobs": 20},
}
KNOWN = 1024


def rows_of(kind: dict[str, Any], lines: int) -> tuple[Rows, LogitsRows]:
    rows = Rows(lines, KNOWN + 8, 16, 1, torch.device("cuda"))
    params = SamplingParams(**{"temperature": 1.0, **kind})
    generator = torch.Generator().manual_seed(1)
    enter = [Enter(i, torch.randint(0, 30000, (KNOWN,), generator=generator).tolist(), KNOWN // 2, params, i, [])
             for i in range(lines)]
    rows.apply(StepPlan(0, enter, [], [np.zeros((0, 3), np.int32)]))
    row, position = np.arange(lines, dtype=np.int32), np.full(lines, KNOWN, np.int32)
    return rows, LogitsRows(np.arange(lines), row, position, torch.from_numpy(row).cuda(), torch.from_numpy(position).cuda())


def measure(kind: dict[str, Any], lines: int, vocab: int, scale: float) -> dict[str, float]:
    """Microseconds of the device for one step's sampling, and of the host to launch it."""
    rows, their = rows_of(kind, lines)
    ops, table = TritonSample(), rows.parameters.table
    features = int(rows.parameters.features[0])
    logits = torch.randn(lines, vocab, device="cuda") * scale
    every = torch.arange(lines, dtype=torch.int32, device="cuda")

    def step() -> None:
        if features & Feature.PENALTY:
            ops.penalize(logits, table, rows.tokens, their.row, their.position, every)
        threshold = ops.threshold(logits, table, their.row) if features & Feature.FILTER else None
        tokens = ops.choose(logits, table, rows.tokens, their.row, their.position, threshold)
        if features & Feature.LOGPROBS:
            ops.score(logits, tokens, 20, every)

    sampler = Sampler(ops, rows)
    enqueued = []
    for _ in range(20):
        began = time.perf_counter()
        sampler.launch(logits, their)
        enqueued.append((time.perf_counter() - began) * 1e6)
        torch.cuda.synchronize()
    return {"us": graph_us([step] * (10 if lines < 64 else 3)), "enqueue_us": statistics.median(enqueued)}


def peer(kind: dict[str, Any], lines: int, vocab: int) -> float | None:
    """The same by PyTorch's operations, without its waits; None where it has no counterpart."""
    if set(kind) - {"temperature", "top_k", "top_p"}:
        return None
    logits = torch.randn(lines, vocab, device="cuda")
    noise = torch.empty_like(logits)
    temperature = kind.get("temperature", 1.0)

    def greedy() -> torch.Tensor:
        return logits.argmax(-1)

    def drawn() -> torch.Tensor:
        x = logits / temperature
        if "top_k" in kind or "top_p" in kind:
            x, order = x.sort(-1, descending=True)
            x[:, kind.get("top_k", vocab):] = -torch.inf
            shares = x.softmax(-1)
            x = x.masked_fill(shares.cumsum(-1) - shares > kind.get("top_p", 1.0), -torch.inf)
            return order.gather(1, (x.softmax(-1) / noise.exponential_()).argmax(-1, keepdim=True))
        return (x.softmax(-1) / noise.exponential_()).argmax(-1)

    return graph_us([drawn if temperature else greedy] * 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", default="1,8,32,128,256")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--json", type=Path, default=Path(os.environ.get("OUT", ".")) / "gpu_sampler.json")
    arguments = parser.parse_args()
    speed = copy_bandwidth()
    record: dict[str, Any] = {"environment": environment(), "copy_bytes_s": speed, "scale": arguments.scale, "microseconds": []}
    counts = [int(one) for one in arguments.lines.split(",")]
    for name, vocab in VOCABULARIES.items():
        print(f"{name}: vocabulary {vocab}; microseconds, (PyTorch's), [host]")
        print(f"{'lines':>24} " + " ".join(f"{lines:>22}" for lines in counts))
        print(f"{'floor':>24} " + " ".join(f"{lines * vocab * 4 / speed * 1e6:>22.1f}" for lines in counts))
        for title, kind in KINDS.items():
            cells = []
            for lines in counts:
                found = measure(kind, lines, vocab, arguments.scale)
                other = peer(kind, lines, vocab)
                record["microseconds"].append({"vocabulary": vocab, "kind": title, "lines": lines, **found, "pytorch_us": other,
                                               "floor_us": lines * vocab * 4 / speed * 1e6})
                cells.append(f"{found['us']:.1f} ({'-' if other is None else f'{other:.0f}'}) [{found['enqueue_us']:.0f}]")
            print(f"{title:>24} " + " ".join(f"{cell:>22}" for cell in cells), flush=True)
    arguments.json.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
