"""Products on a GPU: what each tile of ops/linear_triton.py takes beside cuBLAS and the floor, and which is the best.

usage: gpu_linear.py [--rows 1,2,8,16,32,64] [--shapes name,name] [--chosen] [--json FILE]

Times are those of CUDA graphs that launch a product over copies of the weight in turn, more than 300 MB together, so that L2
(60 MB) holds none of it. The floor is the bytes of weight, input and output over the bandwidth of a device-to-device copy,
taken first. `--chosen` times only what `choose` takes. A chain is a decoder layer's four products one after another, with and
without launches ahead of time (programmatic dependent launch). Prints a table; the record goes to --json or $OUT.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton

from gpu_time import copy_bandwidth, graph_us
from penstock.cli.bench.environment import environment
from penstock.ops import gpu, rows_triton
from penstock.ops.activation import gated as gate
from penstock.ops.linear import Weight
from penstock.ops.linear_invariant import InvariantLinear
from penstock.ops.linear_triton import BOXED, BOXED_GATED, Tile, TritonLinear, choose, launch, library


@dataclass(frozen=True)
class Shape:
    name: str
    n: int
    """Output columns."""
    k: int
    kind: str | None = None
    logits: bool = False

    @property
    def weight_rows(self) -> int:
        return self.n if self.kind is None else 2 * self.n


SHAPES = [Shape("8b.qkv", 6144, 4096), Shape("8b.o", 4096, 4096), Shape("8b.up", 14336, 4096, "silu"),
          Shape("8b.down", 4096, 14336), Shape("8b.head", 128256, 4096, logits=True),
          Shape("06b.qkv", 4096, 1024), Shape("06b.o", 1024, 2048),
          Shape("06b.up", 3072, 1024, "silu"), Shape("06b.down", 1024, 3072), Shape("06b.head", 151936, 1024, logits=True)]

def _one(*cuts: tuple[int, int, int, int, int]) -> list[Tile]:
    return [Tile(1, wide, deep, warps=warps, stages=stages, ahead=ahead) for wide, deep, warps, stages, ahead in cuts]


def _few(tall: int) -> list[Tile]:
    """The deepest fill shared memory with one program."""
    return [Tile(tall, 64, 128, split, stages=stages, swap=True, ahead=ahead) for split in (1, 2, 4)
            for stages, ahead in ((4, 0), (4, 3), (6, 0), (6, 3), (8, 0), (8, 4))]


CANDIDATES = {
    1: _one((4, 1024, 4, 4, 1), (4, 1024, 4, 4, 0), (4, 1024, 4, 4, 2), (4, 1024, 4, 4, 3), (2, 1024, 2, 4, 1),
            (2, 1024, 4, 3, 3), (4, 512, 2, 6, 2), (8, 512, 4, 4, 0), (8, 512, 4, 4, 1), (8, 512, 4, 4, 2), (8, 256, 2, 6, 0),
            (8, 256, 2, 6, 2), (8, 256, 2, 6, 4), (16, 256, 4, 4, 0), (16, 256, 4, 4, 4), (4, 256, 1, 6, 4),
            (16, 512, 8, 3, 1)),
    16: _few(16),
    32: _few(32),
    64: [*_few(64), Tile(64, 32, 128), Tile(64, 32, 128, stages=5, ahead=4), Tile(64, 32, 128, 2), Tile(64, 16, 128, stages=5),
         Tile(64, 16, 128, 2, ahead=3), Tile(64, 64, 128), Tile(64, 128, 64), Tile(64, 128, 64, ahead=3)],
    256: [tile._replace(group=8) for tile in (
        Tile(64, 64, 128), Tile(64, 64, 128, stages=3), Tile(64, 128, 64), Tile(64, 128, 64, ahead=3), Tile(128, 128, 64),
        Tile(128, 128, 64, warps=8), Tile(128, 128, 64, 4), Tile(128, 64, 128, stages=3), Tile(128, 64, 128, 2, stages=3),
        Tile(128, 64, 64, stages=5), Tile(128, 32, 128), Tile(64, 32, 128, stages=5))],
    1 << 30: [BOXED, BOXED._replace(tall=256, wide=128), BOXED_GATED, BOXED_GATED._replace(stages=4),
              BOXED_GATED._replace(tall=256, wide=64)],
}
"""Candidates, by the rows of x that a program takes."""


PEAK = 800e12
"""bf16 operations a second of cuBLAS at its best on an H200."""


def bucket(rows: int) -> int:
    return next(tall for tall in CANDIDATES if rows <= tall)


def weights(shape: Shape, total: int = 320 << 20) -> list[Weight]:
    """Copies of a random weight that together exceed L2 several times."""
    copies = max(2, -(-total // (shape.weight_rows * shape.k * 2)))
    data = torch.randn(copies, shape.weight_rows, shape.k, device="cuda").mul_(shape.k ** -0.5).to(torch.bfloat16)
    return [TritonLinear.pack(one) for one in data]


def exact(x: torch.Tensor, weight: Weight, shape: Shape) -> torch.Tensor:
    y = x.float() @ weight.data.float().T
    return y if shape.kind is None else gate(y, shape.kind)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.float() - wanted).norm() / wanted.norm()).item()


def runner(tile: Tile | None, x: torch.Tensor, weight: Weight, shape: Shape) -> Callable[[], torch.Tensor]:
    dtype = torch.float32 if shape.logits else x.dtype
    if tile is not None:
        return lambda: launch(tile, x, weight, None, dtype, shape.kind)
    if shape.kind is not None:
        return lambda: rows_triton.gated(library(x, weight, None, dtype), shape.kind or "")
    return lambda: library(x, weight, None, dtype)


def invariant_runner(x: torch.Tensor, shape: Shape) -> Callable[[Weight], torch.Tensor]:
    if shape.kind is not None:
        return lambda weight: InvariantLinear.gated(x, weight, None, shape.kind or "")
    return lambda weight: InvariantLinear.apply(x, weight, None, torch.float32 if shape.logits else None)


def compile_all(jobs: list[tuple[Tile, Shape, int]]) -> None:
    """Compiles on all cores what the timing will need, as threads spend that time outside Python."""
    unique: dict[tuple[Any, ...], tuple[Tile, Shape, int]] = {}
    for tile, shape, rows in jobs:
        unique.setdefault((tile, shape.k % (tile.deep * tile.split) == 0, shape.kind, shape.logits), (tile, shape, rows))

    def compile_one(job: tuple[Tile, Shape, int]) -> None:
        tile, shape, rows = job
        x = torch.zeros(rows, shape.k, dtype=torch.bfloat16, device="cuda")
        weight = TritonLinear.pack(torch.zeros(2 * 128 if shape.kind else 128, shape.k, dtype=torch.bfloat16, device="cuda"))
        with suppress(triton.runtime.errors.OutOfResources):
            launch(tile, x, weight, None, torch.float32 if shape.logits else torch.bfloat16, shape.kind)

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(compile_one, unique.values()))


def sweep(shapes: list[Shape], rows_list: list[int], chosen_only: bool, bandwidth: float) -> list[dict[str, Any]]:
    def candidates(shape: Shape, rows: int) -> list[Tile | None]:
        chosen = choose(rows, shape.n, shape.k, shape.kind is not None, boxes=True)
        tiles = [chosen] if chosen_only else [*dict.fromkeys([chosen, *CANDIDATES[bucket(rows)]])]
        blocks = 256 if shape.kind is None else 128  # two rows of the weight for a gated column
        return [t for t in tiles if t is None or ((t.split == 1 or shape.n < 20000)  # no need to split what is wide
                                                  and (not t.boxed or t.tall * t.wide == 128 * blocks))]

    compile_all([(tile, shape, rows) for shape in shapes for rows in rows_list for tile in candidates(shape, rows) if tile])
    found = []
    for shape in shapes:
        copies = weights(shape)
        for rows in rows_list:
            if shape.logits and rows > 256:
                continue
            x = torch.randn(rows, shape.k, device="cuda").to(torch.bfloat16)
            flops = 2 * rows * shape.weight_rows * shape.k
            size = shape.weight_rows * shape.k * 2 + rows * shape.k * 2 + rows * shape.n * (4 if shape.logits else 2)
            wanted = exact(x, copies[0], shape)
            record: dict[str, Any] = {"shape": shape.name, "n": shape.n, "k": shape.k, "kind": shape.kind, "rows": rows,
                                      "floor_us": max(size / bandwidth, flops / PEAK) * 1e6, "tiles": []}
            record["cublas_us"] = graph_us([runner(None, x, weight, shape) for weight in copies])
            invariant = invariant_runner(x, shape)
            assert error(invariant(copies[0]), wanted) < 6e-3, (shape, rows)
            record["invariant_us"] = graph_us([partial(invariant, weight) for weight in copies])
            for tile in candidates(shape, rows):
                if tile is None:
                    continue
                try:
                    wrong = error(runner(tile, x, copies[0], shape)(), wanted)
                    assert wrong < 6e-3, (shape, rows, tile, wrong)
                    us = graph_us([runner(tile, x, weight, shape) for weight in copies])
                except triton.runtime.errors.OutOfResources:
                    continue
                record["tiles"].append({"tile": list(tile), "us": us, "error": wrong})
            record["tiles"].sort(key=lambda entry: entry["us"])
            record["chosen"] = choose(rows, shape.n, shape.k, shape.kind is not None, boxes=True)
            found.append(record)
            show(record)
        del copies
    return found


def short(tile: Any) -> str:
    if tile is None:
        return "cublas"
    t = Tile(*tile)
    more = (" swap" if t.swap else "") + (f" a{t.ahead}" if t.ahead else "")
    return f"{t.tall}x{t.wide}x{t.deep}/{t.split} w{t.warps} s{t.stages}{more}"


def show(record: dict[str, Any]) -> None:
    best, cublas, chosen = record["tiles"][:5], record["cublas_us"], record["chosen"]
    least = min([cublas, *(entry["us"] for entry in best)])
    taken = next((e["us"] for e in record["tiles"] if chosen is not None and tuple(e["tile"]) == tuple(chosen)), cublas)
    floor = record["floor_us"]
    print(f"{record['shape']:9} {record['rows']:3} floor {floor:6.2f} cublas {cublas:6.2f} invariant "
          f"{record['invariant_us']:6.2f} chosen {taken:6.2f} best {least:6.2f} {floor / least:4.0%}  "
          + "; ".join(f"{e['us']:.2f} {short(e['tile'])}" for e in best), flush=True)


def chain(model: str, rows: int, bandwidth: float, layers: int = 8) -> dict[str, Any]:
    """A decoder layer's four products, each reading what the one before wrote, over several layers."""
    shapes = [shape for shape in SHAPES if shape.name.startswith(model) and not shape.logits]

    def random(shape: Shape) -> Weight:
        data = torch.randn(shape.weight_rows, shape.k, device="cuda").mul_(shape.k ** -0.5)
        return TritonLinear.pack(data.to(torch.bfloat16))

    packed = [[random(shape) for shape in shapes] for _ in range(layers)]
    start = torch.randn(rows, shapes[0].k, device="cuda").to(torch.bfloat16)

    def layer_us(serve: Callable[[torch.Tensor, Weight, Shape], torch.Tensor]) -> float:
        def run() -> torch.Tensor:
            x = start
            for layer in packed:
                for weight, shape in zip(layer, shapes, strict=True):
                    x = serve(x[:, :shape.k], weight, shape)
            return x
        return graph_us([run]) / layers

    def ours(x: torch.Tensor, weight: Weight, shape: Shape) -> torch.Tensor:
        return TritonLinear.apply(x, weight) if shape.kind is None else TritonLinear.gated(x, weight, None, shape.kind)

    floor = sum(s.weight_rows * s.k * 2 for s in shapes) / bandwidth * 1e6
    cublas_us, linked_us = layer_us(lambda x, w, s: runner(None, x, w, s)()), layer_us(ours)
    with patch.object(gpu, "linked", lambda device: False):
        alone_us = layer_us(ours)
    record = {"chain": model, "rows": rows, "floor_us": floor, "cublas_us": cublas_us, "alone_us": alone_us,
              "linked_us": linked_us}
    print(" ".join(f"{value:.1f}" if isinstance(value, float) else str(value) for value in record.values()), flush=True)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,2,8,16,32,64")
    parser.add_argument("--shapes", default="")
    parser.add_argument("--chosen", action="store_true")
    parser.add_argument("--json", default=str(Path(os.environ["OUT"]) / "gpu_linear.json") if "OUT" in os.environ else "")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e9:.0f} GB/s")
    rows = [int(r) for r in arguments.rows.split(",")]
    shapes = [s for s in SHAPES if not arguments.shapes or any(s.name.startswith(p) for p in arguments.shapes.split(","))]
    record = {"environment": environment(), "copy_gb_s": bandwidth / 1e9,
              "products": sweep(shapes, rows, arguments.chosen, bandwidth),
              "chains": [chain(model, r, bandwidth) for model in ("8b", "06b") for r in (1, 8, 32)]}
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
