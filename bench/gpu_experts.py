"""Mixtures of experts on a GPU: what each tile of ops/experts_triton.py takes, and what `choose` makes of them.

usage: gpu_experts.py [--rows 1,8,32] [--shape 30b-a3b] [--chosen] [--json FILE]

Times are those of CUDA graphs over several sets of uniformly random picks. Bytes are those of the experts that anybody picked;
the floor is theirs over the bandwidth of a device-to-device copy, or the arithmetic at 800 TFLOP/s where that is longer. Up and
down are timed apart, so that tiles can be combined; then the whole operation as `choose` combines them, its sorting, and its
error against float32. Kernels are compiled first, in parallel. Prints tables; the record goes to --json or $OUT.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpu_time import copy_bandwidth, graph_us
from penstock.ops import compile as compiling, experts_triton, gpu
from penstock.ops.experts import Glu, Stack
from penstock.ops.experts_triton import Plan, Tile, TritonExperts, choose
from penstock.ops.routing import Routing
from penstock.ops.rows_triton import route

SHAPES = {"30b-a3b": (128, 8, 2048, 768), "dsv2lite": (64, 6, 2048, 1408)}
"""Experts, picks, width, inner size."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
FLOPS = 800e12
SETS = 4
OPS = TritonExperts()


_ONE = [(4, 1024, 4), (8, 512, 4), (16, 256, 4), (8, 256, 2), (4, 512, 2), (8, 1024, 8), (2, 1024, 2)]
"""wide, deep, warps of the matrix-vector kernel."""
_FEW = [(64, 128, 2), (64, 128, 3), (64, 128, 4), (64, 64, 4), (64, 256, 2), (128, 64, 3), (64, 64, 6)]
"""wide, deep, stages where experts have few rows."""
_SOME = [(64, 64, 4, 4, True), (64, 64, 4, 4, False), (128, 64, 3, 8, False), (128, 64, 4, 4, False), (64, 128, 3, 4, False)]
"""wide, deep, stages, warps, swap."""
_MANY = [(128, 128, 3, 8), (128, 128, 3, 1), (128, 128, 3, 32), (128, 128, 4, 8), (64, 128, 4, 8), (128, 256, 3, 8),
         (128, 64, 4, 8), (128, 128, 3, 4), (128, 128, 3, 16), (128, 256, 3, 4), (256, 64, 3, 8), (256, 128, 3, 8)]
"""tall, wide, stages, group."""


def candidates(rows: int, each: float, up: bool) -> Iterator[tuple[str, Tile]]:
    """(way, tile) worth a trial where an expert has `each` rows on average. Ways: one, direct, sorted."""
    if rows <= 8:
        for wide, deep, warps in _ONE:
            for stages, ahead in ((2, 0), (3, 0), (4, 0)) if up else ((2, 0), (3, 0), (2, 1), (2, 2), (2, 3)):
                if up or deep <= 512:
                    yield "one", Tile(1, wide, deep if up else min(deep, 256), warps, stages, ahead=ahead)
    if each <= 6:
        for wide, deep, stages in _FEW:
            for way in ("direct", "sorted") if rows <= 64 else ("sorted",):
                yield way, Tile(16, wide, deep, 4, stages, swap=True)
    if 4 <= each <= 40:
        for wide, deep, stages in ((64, 128, 3), (64, 64, 4), (128, 64, 3), (128, 64, 4)):
            yield "sorted", Tile(32, wide, deep, 4, stages, swap=True)
    if 8 <= each <= 160:
        for wide, deep, stages, warps, swap in _SOME:
            yield "sorted", Tile(64, wide, deep, warps, stages, swap=swap)
    for tall, wide, stages, group in _MANY if each >= 32 else []:
        for boxed in (True, False):
            if (boxed or (group == 8 and stages == 3)) and not (up and wide == 256):
                yield "sorted", Tile(tall, wide, 64, 8 if tall * wide >= 16384 else 4, stages, boxed=boxed, group=group)


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of one set: x, picks, weights."""


class Bench:
    """One shape, with real or meta tensors."""

    def __init__(self, shape: str, device: str) -> None:
        self.experts, self.picks, self.width, self.inner = SHAPES[shape]
        make = partial(torch.randn if device == "cuda" else torch.empty, device=device, dtype=torch.bfloat16)
        self.up = OPS.pack(make(self.experts, 2 * self.inner, self.width) * self.width**-0.5)
        self.down = OPS.pack(make(self.experts, self.width, self.inner) * self.inner**-0.5)
        self.make, self.device = make, device
        self.routing = Routing(self.experts, self.picks, normalise=True)

    def plan(self, rows: int, invariant: bool) -> Plan:
        return choose(rows, self.picks, self.experts, invariant, short=self.inner <= 1024)

    def inputs(self, rows: int) -> list[Inputs]:
        logits = [torch.empty(rows, self.experts, device=self.device) if self.device == "meta" else
                  torch.randn(rows, self.experts, device=self.device) for _ in range(SETS)]
        return [(self.make(rows, self.width), *route(one, None, self.routing)) for one in logits]

    def product(self, rows: int, way: str, tile: Tile, up: bool,
                sets: list[Inputs]) -> list[Callable[[], Any]]:
        calls: list[Callable[[], Any]] = []
        for x, picks, weights in sets:
            found = experts_triton._sort(picks, self.experts, tile.tall) if way == "sorted" else None
            inner, results = self.make(picks.numel(), self.inner), self.make(picks.numel(), self.width)
            what: tuple[Any, ...] = (x, self.up) if up else (inner, self.down)
            into: tuple[Any, ...] = (inner, Glu()) if up else (results, None)
            calls.append(partial(experts_triton._product, tile, *what, None, picks, weights, found, *into, False))
        return calls

    def whole(self, plan: Plan, sets: list[Inputs]) -> list[Callable[[], Any]]:
        return [partial(experts_triton.launch, plan, *one, self.up, self.down, Glu()) for one in sets]

    def floor_us(self, sets: list[Inputs], copy: float) -> tuple[float, float]:
        """(bytes of weights, floor in us), means over the sets."""
        read = sum(len(picks.unique()) for _, picks, _ in sets) / len(sets) * 3 * self.inner * self.width * 2
        work = 6 * self.inner * self.width * sets[0][1].numel()
        return read, max(read / copy, work / FLOPS) * 1e6


def check(bench: Bench, plan: Plan, x: torch.Tensor, picks: torch.Tensor, weights: torch.Tensor) -> float:
    """The largest error of the operation against float32, relative to the largest result."""
    got = experts_triton.launch(plan, x, picks, weights, bench.up, bench.down, Glu()).float()
    wide = [Stack(stack.data[:], stack.count, stack.n, stack.k, stack.dtype, OPS) for stack in (bench.up, bench.down)]
    total = torch.zeros_like(got)
    for expert in picks.unique().tolist():
        token, place = (picks == expert).nonzero(as_tuple=True)
        inner = Glu()((x[token].float() @ wide[0].data[expert].float().T).bfloat16().float()).bfloat16().float()
        total.index_add_(0, token, inner @ wide[1].data[expert].float().T * weights[token, place, None])
    return float((got - total).abs().max() / total.abs().max())


def precompile(shape: str, rows: list[int], chosen: bool) -> None:
    """Compiles every kernel that will be timed, on all cores."""
    bench = Bench(shape, "meta")
    chip = gpu.chip(torch.device("cuda"))
    compiling.watch()
    with compiling.recording(chip) as jobs:
        for count in rows:
            sets = bench.inputs(count)[:1]
            bench.whole(bench.plan(count, False), sets)[0]()
            bench.whole(bench.plan(count, True), sets)[0]()
            for up in () if chosen else (True, False):
                for way, tile in candidates(count, count * bench.picks / bench.experts, up):
                    bench.product(count, way, tile, up, sets)[0]()
    work = compiling.Compilation(jobs.values(), chip.capability)
    for job, why in work.wait():
        print("not compiled:", job.kernel, why.strip().splitlines()[-1][:160], flush=True)
    print(f"compiled {work.compiled} kernels in {work.seconds:.0f} s", flush=True)


def run(shape: str, rows: list[int], chosen: bool) -> list[dict[str, Any]]:
    precompile(shape, rows, chosen)
    copy, record = copy_bandwidth(), list[dict[str, Any]]()
    print(f"copy: {copy / 1e12:.2f} TB/s")
    torch.manual_seed(0)
    bench = Bench(shape, "cuda")
    for count in rows:
        sets = bench.inputs(count)
        read, floor = bench.floor_us(sets, copy)
        each = count * bench.picks / bench.experts
        for up in () if chosen else (True, False):
            found = []
            for way, tile in candidates(count, each, up):
                try:
                    found.append((graph_us(bench.product(count, way, tile, up, sets) * 2, 5), way, tile))
                except Exception as error:  # noqa: BLE001 (a tile may be too large for the device)
                    print("failed:", count, way, tile, type(error).__name__, str(error)[:100])
                    torch.cuda.synchronize()
            share = floor * (2 if up else 1) / 3
            for us, way, tile in sorted(found)[:4]:
                name = "up" if up else "down"
                print(f"{count:5} {name:5} {us:8.1f} us {100 * share / us:4.0f} %  {way} {tuple(tile)}", flush=True)
            record += [{"rows": count, "up": up, "us": us, "way": way, "tile": tuple(tile)} for us, way, tile in sorted(found)]
        for invariant in (False, True):
            plan = bench.plan(count, invariant)
            us, error = graph_us(bench.whole(plan, sets), 5), check(bench, plan, *sets[0])
            sorting = [partial(experts_triton._sort, sets[0][1], bench.experts, plan.up.tall)] * 4
            sort = graph_us(sorting, 5) if plan.sort else 0.0
            logits = torch.randn(count, bench.experts, device="cuda")
            routing = graph_us([partial(route, logits, None, bench.routing)] * 4, 5)
            print(f"{count:5} {'invariant' if invariant else 'whole':9} {us:8.1f} us, {100 * floor / us:3.0f} % of the floor, "
                  f"{read / us / 1e6:5.2f} TB/s, {6e-6 * bench.inner * bench.width * sets[0][1].numel() / us:5.0f} TFLOP/s; "
                  f"sort {sort:.1f}, route {routing:.1f}; error {error:.1e}", flush=True)
            record.append({"rows": count, "whole": us, "invariant": invariant, "floor": floor, "sort": sort, "route": routing,
                           "error": error, "bytes": read})
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--shape", default="30b-a3b", choices=SHAPES)
    parser.add_argument("--chosen", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    record = run(args.shape, [int(count) for count in args.rows.split(",")], args.chosen)
    place = args.json or (os.environ.get("OUT") and str(Path(os.environ["OUT"]) / f"experts-{args.shape}.json"))
    if place:
        Path(place).write_text(json.dumps(record))


if __name__ == "__main__":
    main()
