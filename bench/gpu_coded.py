"""Products of quantized matrices on a GPU: what each tile of ops/coded_triton.py takes beside the library and the floor.

usage: gpu_coded.py [--schemes int4g128,fp8] [--rows 1,8,32,128,256,2048,8192] [--shapes qkv,up] [--sweep] [--json FILE]

The shapes are the four matrices of an 8B layer. Times are those of CUDA graphs over copies of the weight that exceed L2, the
floor that of bench/gpu_linear.py: stored bytes over the copy's bandwidth, or operations over the tensor cores' rate. "auto" is
the kernel that serves, "lib" the library (after decoding the matrix, if it must); --sweep adds the best tiles of `candidates`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from gpu_time import copy_bandwidth, graph_us
from penstock.cli.bench.environment import environment
from penstock.ops import coded_triton as ct
from penstock.ops.activation import gated as gate
from penstock.ops.coded_forms import CodedWeight
from penstock.ops.coded_triton import CodedTriton
from penstock.ops.linear_triton import Tile
from penstock.quant.fp8 import FP8
from penstock.quant.gguf import GGUF
from penstock.quant.integer import Grouped, Int8
from penstock.quant.microscaling import MXFP4, MXFP8, NVFP4
from penstock.quant.normal import Table4

SCHEMES: dict[str, Any] = {
    "int4g128": Grouped(4, 128), "awq": Grouped(4, 128, "uint8"), "fp8": FP8("token"), "fp8_block": FP8("group", (128, 128)),
    "fp8_plain": FP8(), "int8": Int8("token"), "int8_plain": Int8(), "int8g128": Grouped(8, 128), "int4g32": Grouped(4, 32),
    "mxfp4": MXFP4(), "mxfp8": MXFP8(), "nvfp4": NVFP4(), "nf4": Table4("nf4", 64), "q4_k": GGUF("q4_k")}
SHAPES = {"qkv": (6144, 4096, False), "o": (4096, 4096, False), "up": (28672, 4096, True), "down": (4096, 14336, False)}
PEAK = {torch.bfloat16: 800e12, torch.float8_e4m3fn: 1600e12, torch.int8: 1600e12}


def candidates(weight: CodedWeight, rows: int, gated: bool) -> list[Tile]:
    tall = max(16, 1 << (rows - 1).bit_length())
    found = []
    if rows <= 64:
        depths = ((2, 3), (2, 4), (2, 6), (4, 3)) if weight.four else ((1, 4), (1, 6), (1, 8), (2, 4))
        if rows > 16:
            depths = depths[:3]
        for count, stages in depths:
            for split in (1, 2) if gated else (1, 2, 4, 8):
                if weight.n // 64 * split <= 900:
                    found.append(Tile(tall, 64, count, split, stages=stages, swap=True))
    else:
        for wide, warps, stages in ((64, 4, 3), (64, 4, 4), (128, 8, 3)):
            for split in (1, 2, 4):
                if split * -(-weight.n // wide) * -(-rows // 128) <= 400 and (not gated or (split == 1 and stages == 3)):
                    found.append(Tile(128, wide, 1, split, warps, stages, swap=True, group=8))
    return [cut for cut in found if weight.padded % (cut.deep * weight.unit) == 0]


def superblocks(n: int, k: int) -> dict[str, torch.Tensor]:
    """Q4_K's blocks with random codes and 6-bit scales, about as large as the matrix would have them."""
    found = torch.randint(0, 256, (n, k // 256, 144), dtype=torch.uint8, device="cuda")
    found[..., :4] = torch.tensor([k ** -0.5 / 100, k ** -0.5 / 15], dtype=torch.float16, device="cuda").view(torch.uint8)
    return {"weight": found.flatten(-2)}


def tried(call: Callable[[], Any]) -> bool:
    try:
        call()
    except triton.runtime.errors.OutOfResources:
        return False
    except (triton.compiler.errors.CompilationError, RuntimeError) as error:
        print("   ", type(error).__name__, str(error)[:150].replace("\n", " "), flush=True)
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--rows", default="1,8,32,128,256,2048,8192")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--json", default=str(Path(os.environ["OUT"]) / "gpu_coded.json") if "OUT" in os.environ else "")
    arguments = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e9:.0f} GB/s", flush=True)
    rows_list = [int(r) for r in arguments.rows.split(",")]
    records = [record for name in arguments.schemes.split(",") for shape in arguments.shapes.split(",")
               for record in measured(name, shape, rows_list, arguments.sweep, bandwidth)]
    if arguments.json:
        with Path(arguments.json).open("a") as file:
            file.write(json.dumps({"environment": environment(), "copy_gb_s": bandwidth / 1e9, "products": records}) + "\n")


def measured(name: str, shape: str, rows_list: list[int], sweep: bool, bandwidth: float) -> list[dict[str, Any]]:
    scheme, (n, k, gated) = SCHEMES[name], SHAPES[shape]
    matrix = torch.randn(n, k, device="cuda").mul_(k ** -0.5).to(torch.bfloat16)
    parts = superblocks(n, k) if name == "q4_k" else scheme.encode(matrix)
    exact = scheme.decode(parts, torch.float32)
    first = CodedTriton.pack(scheme, parts, (n, k), torch.bfloat16)
    copies = [first] + [CodedTriton.pack(scheme, {key: part.clone() for key, part in parts.items()}, (n, k), torch.bfloat16)
                        for _ in range(max(1, (320 << 20) // first.nbytes))]
    ops, kind, records = CodedTriton(False), "silu" if gated else None, []
    tiles = {rows: candidates(first, rows, gated) if sweep else [] for rows in rows_list}

    def run(cut: Tile, x: torch.Tensor, weight: CodedWeight) -> torch.Tensor:
        codes, scales = (x, None) if weight.scaled == "none" else ct.quantized(x, weight)
        return ct.launch(cut, codes, scales, weight, None, x.dtype, kind)

    with ThreadPoolExecutor(16) as pool:
        jobs = {cut: rows for rows in rows_list for cut in tiles[rows]}
        list(pool.map(lambda job: tried(lambda: run(job[0], torch.zeros(job[1], k, device="cuda").bfloat16(), first)),
                      jobs.items()))
    for rows in rows_list:
        x = torch.randn(rows, k, device="cuda").to(torch.bfloat16)
        wanted = scheme.inputs(x, parts).float() @ exact.T
        wanted = gate(wanted, "silu") if gated else wanted

        def auto(weight: CodedWeight, x: torch.Tensor = x) -> torch.Tensor:
            return ops.gated(x, weight, None, "silu") if gated else ops.apply(x, weight)

        def library(weight: CodedWeight, x: torch.Tensor = x) -> torch.Tensor:
            codes, scales = (x, None) if weight.scaled == "none" else ct.quantized(x, weight)
            return ct._library(codes, scales, weight, None, x.dtype, kind)

        rate = PEAK[torch.bfloat16 if first.scaled == "none" else first.data.dtype]
        floor = max((first.nbytes + 2 * rows * (k + n)) / bandwidth, 2 * rows * n * k / rate) * 1e6
        record: dict[str, Any] = {"scheme": name, "shape": shape, "rows": rows, "floor_us": floor, "tiles": []}
        some = copies if rows <= 512 else copies[:2]
        options: list[tuple[str, Callable[[CodedWeight], torch.Tensor]]] = [("auto", auto)]
        tensor_cores = first.data.dtype is torch.float8_e4m3fn and (first.form == "row" or first.blocks is not None)
        if first.scaled == "none" or tensor_cores:
            options.append(("lib", library))
        if rows == 1:
            options.append(("few", lambda weight, x=x: run(ct.few(1, weight, gated), x, weight)))
        options += [(cut_name(cut), lambda weight, cut=cut, x=x: run(cut, x, weight)) for cut in tiles[rows]]
        for label, call in options:
            if not tried(partial(call, first)):
                continue
            wrong = ((call(first).float() - wanted).norm() / wanted.norm()).item()
            us = graph_us([partial(call, weight) for weight in some], repeats=5)
            record["tiles"].append({"tile": label, "us": us, "error": wrong})
        served = record["tiles"][0]
        best = sorted(record["tiles"], key=lambda entry: entry["us"])[:5]
        bad = [entry for entry in record["tiles"] if not entry["error"] < 8e-3]
        print(f"{name:9} {shape:4} {rows:5} floor {floor:7.1f} auto {served['us']:7.1f} ({floor / served['us']:4.0%}) "
              + "; ".join(f"{entry['us']:.1f} {entry['tile']}" for entry in best)
              + "".join(f"  WRONG {entry['tile']} {entry['error']:.3g}" for entry in bad[:3]), flush=True)
        records.append(record)
    return records


def cut_name(cut: Tile) -> str:
    return f"{cut.tall}x{cut.wide}x{cut.deep}/{cut.split} w{cut.warps} s{cut.stages}"


if __name__ == "__main__":
    main()
