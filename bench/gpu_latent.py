"""Latent attention (MLA) on a GPU: decoding's share of the copy's rate for several shapes of tiles, and prompts in both forms.

usage: gpu_latent.py [--sweep] [--cases NAMES] [--json FILE]

Latents are those of DeepSeek V2 and V3: 576 elements a position, of which 512 are the value. Times are those of CUDA graphs
over several caches in turn, so that L2 holds none. Prompts are attended to absorbed, and expanded to heads of 192 and 128.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from gpu_time import copy_bandwidth, graph_us
from penstock.ops import attention_library, attention_work
from penstock.ops.attention import AttentionOps, Geometry, Span
from penstock.ops.attention_triton import TRITON
from penstock.ops.attention_work import Shape

RANK, TURNED, PAGE = 512, 64, 16
DECODE = [("b1 2k", [2048]), ("b1 32k", [32768]), ("b8 600", [600] * 8), ("b8 32k", [32768] * 8), ("b32 600", [600] * 32),
          ("b256 600", [600] * 256)]
SWEPT = [(16, 64, 4, 2, 1), (16, 32, 4, 4, 1), (16, 32, 4, 2, 2), (16, 64, 4, 1, 2), (16, 128, 8, 1, 1), (64, 64, 8, 2, 1),
         (64, 32, 8, 4, 1), (64, 32, 8, 2, 1), (64, 64, 8, 1, 1)]
"""(rows, block of keys, warps, stages, programs a multiprocessor)."""


class Cache:
    """Several caches of latents with the tables of segments of these contexts."""

    def __init__(self, heads: int, contexts: list[int], queries: int = 1) -> None:
        self.geometry = Geometry(heads, 1, RANK, PAGE, tail=TURNED)
        self.context = np.array(contexts, np.int32)
        self.counts = np.full(len(contexts), queries, np.int32)
        used = [-(-context // PAGE) for context in contexts]
        self.bytes = sum(contexts) * (RANK + TURNED) * 2
        self.copies = min(32, max(2, -(-(320 << 20) // self.bytes)))
        self.latents = torch.randn(self.copies * sum(used), 1, PAGE, RANK + TURNED, device="cuda", dtype=torch.bfloat16)
        order = torch.randperm(len(self.latents), device="cuda", dtype=torch.int32).view(self.copies, -1)
        self.tables = torch.zeros(self.copies, len(contexts), max(used), device="cuda", dtype=torch.int32)
        for s, at in enumerate(np.cumsum(used) - used):
            self.tables[:, s, :used[s]] = order[:, at:at + used[s]]
        tokens = int(self.counts.sum())
        self.q = torch.randn(tokens, heads, RANK + TURNED, device="cuda", dtype=torch.bfloat16)
        self.query_start = torch.tensor(np.concatenate(([0], self.counts.cumsum())), device="cuda", dtype=torch.int32)
        self.there = torch.from_numpy(self.context).cuda()

    def run(self, ops: AttentionOps, copy: int, work: torch.Tensor | None) -> torch.Tensor:
        return ops.apply(self.q, self.latents, self.latents[..., :RANK], self.tables[copy], self.query_start, self.there,
                         192 ** -0.5, work=work)

    def measure(self) -> tuple[float, float]:
        """Microseconds, and the relative error of the last token."""
        found = TRITON.prepare(self.geometry, self.counts, self.context, len(self.counts), len(self.q))
        work = torch.from_numpy(found).cuda()
        last = AttentionOps().apply(self.q[-1:].float(), self.latents, self.latents[..., :RANK], self.tables[0, -1:],
                                    torch.tensor([0, 1]), self.there[-1:], 192 ** -0.5)
        error = float((self.run(TRITON, 0, work)[-1:].float() - last).norm() / last.norm())
        return graph_us([lambda copy=copy: self.run(TRITON, copy, work) for copy in range(self.copies)]), error


def shapes(heads: int, sweep: bool) -> Iterator[Shape | None]:
    yield None
    for rows, block, warps, stages, resident in SWEPT if sweep else ():
        group = min(heads, attention_work.LATENT_HEADS)
        if rows == max(16, group):
            yield Shape(rows, block, rows // group, warps, stages, resident)


def decoding(sweep: bool, rate: float, chosen: list[str]) -> Iterator[dict[str, object]]:
    usual = attention_work._latent_shapes
    for heads in (16, 128):
        for name, contexts in DECODE:
            if chosen and name not in chosen:
                continue
            cache = Cache(heads, contexts)
            for shape in shapes(heads, sweep):
                if shape is not None:
                    attention_work._latent_shapes = lambda *given, shape=shape: (shape, usual(*given)[1])
                attention_work.layout.cache_clear()
                try:
                    us, error = cache.measure()
                    row = {"case": name, "heads": heads, "shape": "" if shape is None else str(shape)[6:-1], "us": round(us, 1),
                           "of the copy": round(cache.bytes / us * 1e6 / rate, 3), "error": round(error, 5)}
                except Exception as failure:  # noqa: BLE001  (a shape that does not fit is a result)
                    row = {"case": name, "heads": heads, "shape": str(shape), "failed": str(failure)[:100]}
                finally:
                    attention_work._latent_shapes = usual
                    attention_work.layout.cache_clear()
                print(row, flush=True)
                yield row
            del cache


def _rows(k: torch.Tensor, v: torch.Tensor, begin: int, _end: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return k[begin:begin + size], v[begin:begin + size]


def prompts() -> Iterator[dict[str, object]]:
    """A prompt's attention absorbed and expanded, the expansion's own product not counted."""
    for heads, count, before in ((16, 2048, 0), (16, 8192, 0), (16, 2048, 30720), (128, 2048, 0)):
        cache = Cache(heads, [before + count], count)
        absorbed = cache.measure()[0]
        length = before + count
        k = torch.randn(length + 16384, heads, 192, device="cuda", dtype=torch.bfloat16)
        q, v, out = k[:count].clone(), torch.randn_like(k[..., :128]), torch.empty_like(k[:count, :, :128])
        span = Span(0, 0, count, before)

        expanded = partial(attention_library.continued, q, partial(_rows, k, v), 192 ** -0.5, span, out)
        row: dict[str, object] = {"heads": heads, "queries": count, "before": before, "absorbed us": round(absorbed, 1)}
        try:
            expanded()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(10):
                expanded()
            end.record()
            end.synchronize()
            row["expanded us"] = round(start.elapsed_time(end) * 100, 1)
            wanted = torch.empty_like(out[-16:], dtype=torch.float32)
            AttentionOps().expanded(q[-16:].float(), partial(_rows, k.float(), v.float()), 192 ** -0.5,
                                    Span(0, 0, 16, length - 16), wanted)
            row["error"] = round(float((out[-16:].float() - wanted).norm() / wanted.norm()), 5)
        except Exception as failure:  # noqa: BLE001
            row["failed"] = str(failure)[:300]
        print(row, flush=True)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--cases", default="", help="of decoding, by name; without prompts")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rate = copy_bandwidth()
    print(f"copy {rate / 1e12:.2f} TB/s")
    with torch.inference_mode():
        chosen = args.cases.split(",") if args.cases else []
        record = {"copy": rate, "prompts": [] if chosen else list(prompts()),
                  "decode": list(decoding(args.sweep, rate, chosen))}
    file = args.json or (Path(os.environ["OUT"]) / "latent.json" if "OUT" in os.environ else None)
    if file is not None:
        file.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
