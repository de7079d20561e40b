"""Kernels that go over rows, on a GPU: latency in a graph at few rows, bandwidth at many, beside plain PyTorch.

usage: gpu_rows.py [--tune] [--json FILE]

Latency is that of one launch in a CUDA graph of many, one after another. Bandwidth counts every byte that must be read or
written once, over buffers that together exceed L2 (60 MB) several times, beside that of a device-to-device copy. `--tune` tries
other ways to cut the work, and launches that do not overlap. Prints a table; the record goes to --json or $OUT.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from gpu_time import copy_bandwidth, graph_us
from penstock.cli.bench.environment import environment
from penstock.ops import activation, gpu, norm, rope, rows_triton, step

Call = Callable[[], Any]
FEW, MANY = (1, 32, 256), 8192
BF16 = torch.bfloat16


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(BF16)


def norms(module: Any, rows: int, width: int) -> tuple[Call, int]:
    x, residual, weight = random(rows, width), random(rows, width), random(width)
    return (lambda: module.add_rms_norm(x, residual, weight, 1e-6)), 4 * x.nbytes


def plain_norms(module: Any, rows: int, width: int) -> tuple[Call, int]:
    x, weight = random(rows, width), random(width)
    return (lambda: module.rms_norm(x, weight, 1e-6)), 2 * x.nbytes


def layer_norms(module: Any, rows: int, width: int) -> tuple[Call, int]:
    x, weight = random(rows, width), random(2, width)
    return (lambda: module.layer_norm(x, weight[0], weight[1], 1e-6)), 2 * x.nbytes


def gates(module: Any, rows: int, inner: int) -> tuple[Call, int]:
    x = random(rows, 2 * inner)
    return (lambda: module.gated(x, "silu")), x.nbytes * 3 // 2


def ropes(module: Any, rows: int, heads: int, kv_heads: int, size: int, normed: bool) -> tuple[Call, int]:
    qkv = random(rows, heads + 2 * kv_heads, size)
    q, k, v = qkv[:, :heads], qkv[:, heads:heads + kv_heads], qkv[:, heads + kv_heads:]
    cache = random(2, -(-rows // 16) + 1, kv_heads, 16, size)
    table = torch.randn(2, 32768, size // 2, device="cuda")
    positions = torch.randint(0, 32768, (rows,), dtype=torch.int32, device="cuda")
    slots = torch.randperm(rows, device="cuda")
    scale = random(size) if normed else None
    return (lambda: module.rope_write(q, k, v, positions, slots, cache[0], cache[1], table[0], table[1], scale, scale)), \
        2 * qkv.nbytes + rows * size * 4


def gathers(module: Any, rows: int, width: int) -> tuple[Call, int]:
    table = random(2 * MANY, width)
    ids = torch.randperm(2 * MANY, device="cuda")[:rows].int()
    return (lambda: module.gather(ids, table)), 2 * rows * width * 2


class Embedding:
    @staticmethod
    def gather(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, table)


def steps(module: Any, rows: int, columns: int) -> tuple[Call, int]:
    """`rows` segments of one token each, of contexts that fill half of the table."""
    known = torch.zeros(rows, columns * 16, dtype=torch.int32, device="cuda")
    tables = [torch.zeros(rows, columns, dtype=torch.int32, device="cuda")]
    row = torch.arange(rows, dtype=torch.int32, device="cuda")
    ends = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    start = torch.full((rows,), columns * 8, dtype=torch.int32, device="cuda")
    return (lambda: module.build_step(known, tables, row, start, ends, 16, rows, columns)), rows * (columns * 4 + 40)


CASES: list[tuple[str, Any, Any, Any, tuple[Any, ...]]] = [
    ("add_rms_norm 4096", norms, rows_triton, norm, (4096,)), ("add_rms_norm 1024", norms, rows_triton, norm, (1024,)),
    ("add_rms_norm 2560", norms, rows_triton, norm, (2560,)), ("rms_norm 4096", plain_norms, rows_triton, norm, (4096,)),
    ("layer_norm 1600", layer_norms, rows_triton, norm, (1600,)),
    ("gated 14336", gates, rows_triton, activation, (14336,)),
    ("gated 3072", gates, rows_triton, activation, (3072,)),
    ("rope 32/8 x 128", ropes, rows_triton, rope, (32, 8, 128, False)),
    ("rope 16/8 x 128 normed", ropes, rows_triton, rope, (16, 8, 128, True)),
    ("rope 8/4 x 256 normed", ropes, rows_triton, rope, (8, 4, 256, True)),
    ("rope 12/12 x 64", ropes, rows_triton, rope, (12, 12, 64, False)),
    ("gather 4096", gathers, rows_triton, Embedding, (4096,)), ("gather 1024", gathers, rows_triton, Embedding, (1024,)),
    ("build_step 128 pages", steps, rows_triton, step, (128,)), ("build_step 8192 pages", steps, rows_triton, step, (8192,)),
]

TUNED: list[tuple[str, Any, str, tuple[Any, ...]]] = [
    ("add_rms_norm", rows_triton, "_VECTOR", ((16, 16), (32, 32), (16, 64))),
    ("gated", rows_triton, "_ACTIVATED", (512, 2048)), ("rope", rows_triton, "_EARLY", (False,)),
    ("rope", rows_triton, "_NUMBERS", ({}, {64: 512, 128: 512, 256: 512}, {64: 4096, 128: 4096, 256: 2048})),
    ("gather", rows_triton, "_COPIED", (1024, 4096)),
]


@contextmanager
def setting(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def measure(make: Any, module: Any, arguments: tuple[Any, ...]) -> dict[str, float]:
    """Microseconds at few rows; GB/s at many, but for steps, which have no many."""
    found = {f"us_{rows}": graph_us([make(module, rows, *arguments)[0]] * 40) for rows in FEW}
    if make is not steps:
        call, size = make(module, MANY, *arguments)
        calls = [call, *(make(module, MANY, *arguments)[0] for _ in range(min(7, (400 << 20) // size)))]
        found["us_8192"] = graph_us(calls)
        found["gb_s_8192"] = size / found["us_8192"] / 1e3
    return found


def show(name: str, what: str, found: dict[str, float]) -> None:
    figures = " ".join(f"{key.removeprefix('us_')}:{value:8.2f}" for key, value in found.items())
    print(f"{name:24} {what:16} {figures}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--json", default=str(Path(os.environ["OUT"]) / "gpu_rows.json") if "OUT" in os.environ else "")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    record: dict[str, Any] = {"environment": environment(), "copy_gb_s": copy_bandwidth() / 1e9, "cases": []}
    print(f"copy {record['copy_gb_s']:.0f} GB/s")
    for name, make, ours, plain, sizes in CASES:
        entry: dict[str, Any] = {"case": name, "triton": measure(make, ours, sizes), "tried": []}
        show(name, "triton", entry["triton"])
        # The plain ways to write into a cache and to build a step wait for the device, and cannot be captured.
        entry["torch"] = measure(make, plain, sizes) if make not in (steps, ropes) else None
        if entry["torch"]:
            show("", "torch", entry["torch"])
        if arguments.tune:
            with setting(gpu, "linked", lambda device: False):
                tried = measure(make, ours, sizes)
            show("", "not linked", tried)
            entry["tried"].append({"linked": False, **tried})
            for start, module, constant, values in TUNED:
                for value in values if name.startswith(start) else ():
                    with setting(module, constant, value):
                        tried = measure(make, ours, sizes)
                    show("", f"{constant} {value}", tried)
                    entry["tried"].append({constant: value, **tried})
        record["cases"].append(entry)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
