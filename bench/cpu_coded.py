"""Products of quantized matrices on this CPU: GB/s of stored weights at few rows, 10^9 multiply-adds a second at many.

usage: cpu_coded.py [--threads 2] [--schemes q4_0,q8_0] [--rows 1,4,16,128]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from penstock.ops.registry import bind, set_threads
from penstock.platform.facts import detect
from penstock.quant.fp8 import FP8
from penstock.quant.gguf import GGUF
from penstock.quant.integer import Grouped, Int8

SCHEMES: dict[str, Any] = {"q8_0": GGUF("q8_0"), "q4_0": GGUF("q4_0"), "q4_k": GGUF("q4_k"), "q6_k": GGUF("q6_k"),
                           "int8": Int8("token"), "int4g128": Grouped(4, 128), "fp8": FP8("token"),
                           "fp8_block": FP8("group", (128, 128)), "awq": Grouped(4, 128, "uint8"), "gptq32": Grouped(4, 32)}
BYTES = {"q4_k": (144, 0, 2), "q6_k": (210, 208, 1)}


def stored(name: str, n: int, k: int) -> dict[str, torch.Tensor]:
    if name not in BYTES:
        return SCHEMES[name].encode(torch.randn(n, k))
    size, at, count = BYTES[name]
    found = torch.randint(0, 256, (n, k // 256, size), dtype=torch.uint8)
    found[..., at:at + 2 * count] = (torch.rand(n, k // 256, count) * 1e-3).half().view(torch.uint8)
    return {"weight": found.flatten(1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--rows", default="1,4,8,16,128")
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    dtype, n, k = getattr(torch, arguments.dtype), 11264, 2048
    kernels = bind(detect("cpu"), dtype)
    set_threads(arguments.threads, kernels)
    for name in arguments.schemes.split(","):
        ops = kernels.linear_for(SCHEMES[name].name, n, k)
        parts = stored(name, n, k)
        weights = [ops.pack(SCHEMES[name], parts, (n, k), dtype) for _ in range(max(2, (200 << 20) // (n * k)))]
        for rows in map(int, arguments.rows.split(",")):
            x, times = torch.randn(rows, k).to(dtype), list[float]()
            for _ in range(7 if rows < 64 else 3):
                for weight in weights:
                    begin = time.perf_counter()
                    ops.apply(x, weight)
                    times.append(time.perf_counter() - begin)
            least, middle = min(times), statistics.median(times)
            rate = weights[0].nbytes / middle / 1e9
            print(f"{name:9} {rows:4} rows: {middle * 1e3:7.2f} ms ({least * 1e3:.2f}) {rate:6.1f} GB/s "
                  f"{rows * n * k / middle / 1e9:7.1f} G/s", flush=True)


if __name__ == "__main__":
    main()
