"""CPU kernels by themselves: each operation against this machine's measured ceilings, and a whole model-shaped step.

usage: cpu_kernels.py [--isa avx512|avx2|portable] [--dtype bfloat16|float16|float32] [--threads N] [--quick] [--steps-only]

Prints JSON, one object a line. A step is everything that a Llama-shaped model computes for a batch (TinyLlama 1.1B: 22 layers
of width 2048, FFN 5632, 32 query and 4 KV heads of 64, vocabulary 32000), called in sequence without an engine around it.
Times are medians; `best` is the least. GB/s counts the bytes of weights or cache that must be read, GFLOP/s two operations a
multiply-add.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from penstock.ops import native
from penstock.ops.linear import Weight
from penstock.ops.registry import Kernels, bind
from penstock.platform.facts import detect


@dataclass(frozen=True)
class Shape:
    width: int = 2048
    ffn: int = 5632
    layers: int = 22
    heads: int = 32
    kv: int = 4
    size: int = 64
    vocabulary: int = 32000


def timed(call: Callable[[], Any], seconds: float = 1.0, least: int = 5) -> tuple[float, float]:
    """(median, least) seconds of a call, after one that warms up."""
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times), min(times)


def show(**fields: Any) -> None:
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in fields.items()}), flush=True)


def ceilings(kernels: Kernels) -> None:
    """The machine's limits: bytes read by a sum over memory that no cache holds, and f32 products by torch (its BLAS)."""
    numbers = torch.zeros(1 << 27)
    _, best = timed(lambda: numbers.sum())
    show(ceiling="read", gb_s=numbers.nbytes / best / 1e9)
    a = torch.randn(2048, 2048)
    _, best = timed(lambda: a @ a)
    show(ceiling="f32 product of torch", gflop_s=2 * 2048 ** 3 / best / 1e9)


class Model:
    """Random weights of the shape, packed, and the step over them."""

    def __init__(self, kernels: Kernels, dtype: torch.dtype, shape: Shape, context: int, rows: int) -> None:
        self.kernels, self.dtype, self.shape = kernels, dtype, shape
        s = shape

        def matrix(n: int, k: int) -> Weight:
            return kernels.linear.pack((torch.randn(n, k) * 0.02).to(dtype))

        self.layers = [(matrix((s.heads + 2 * s.kv) * s.size, s.width), matrix(s.width, s.heads * s.size),
                        matrix(2 * s.ffn, s.width), matrix(s.width, s.ffn)) for _ in range(s.layers)]
        self.head, self.embedding = matrix(s.vocabulary, s.width), matrix(s.vocabulary, s.width)
        self.bytes = sum(w.nbytes for layer in self.layers for w in layer) + self.head.nbytes
        self.norm = torch.ones(s.width, dtype=dtype)
        self.page, self.columns = 16, context // 16 + 1
        self.cache = torch.randn(rows * self.columns, s.layers, 2, s.kv, self.page, s.size).to(dtype)
        angles = torch.arange(context + 1)[:, None] * 10000 ** (-torch.arange(0, s.size, 2) / s.size)
        self.cos, self.sin = angles.cos(), angles.sin()

    def step(self, segments: list[tuple[int, int]], heads: int) -> Callable[[], torch.Tensor]:
        """A step of segments (context, queries) with logits for the last `heads` rows."""
        s, k = self.shape, self.kernels
        counts = [n for _, n in segments]
        table = torch.arange(len(segments) * self.columns).view(len(segments), -1).int()
        positions = torch.cat([torch.arange(c - n, c) for c, n in segments])
        row = torch.repeat_interleave(torch.arange(len(segments)), torch.tensor(counts))
        slots = table.long()[row, positions // self.page] * self.page + positions % self.page
        positions = positions.int()
        context = torch.tensor([c for c, _ in segments]).int()
        start = torch.tensor([0, *counts]).cumsum(0).int()
        tokens = torch.randint(0, s.vocabulary, (len(row),))
        split = (s.heads * s.size, s.kv * s.size, s.kv * s.size)

        def run() -> torch.Tensor:
            residual = k.linear.gather(tokens, self.embedding)
            x = k.rms_norm(residual, self.norm, 1e-5)
            for i, (qkv, o, up, down) in enumerate(self.layers):
                q, key, v = (t.view(-1, t.shape[1] // s.size, s.size) for t in k.linear.apply(x, qkv).split(split, 1))
                keys, values = self.cache[:, i, 0], self.cache[:, i, 1]
                q = k.rope_write(q, key, v, positions, slots, keys, values, self.cos, self.sin)
                a = k.attention.apply(q, keys, values, table, start, context, s.size ** -0.5)
                x, residual = k.add_rms_norm(k.linear.apply(a.view(len(tokens), -1), o), residual, self.norm, 1e-5)
                inner = k.linear.gated(x, up, None, "silu")
                x, residual = k.add_rms_norm(k.linear.apply(inner, down), residual, self.norm, 1e-5)
            return k.linear.apply(x[-heads:], self.head, None, torch.float32)

        return run


def steps(kernels: Kernels, dtype: torch.dtype, quick: bool) -> None:
    shape = Shape()
    model = Model(kernels, dtype, shape, 528, 16)
    products = sum(w.n * w.k for layer in model.layers for w in layer)
    for batch in (1, 4, 8, 16):
        run = model.step([(140, 1)] * batch, batch)
        median, best = timed(run, 1.0 if quick else 4.0)
        show(step="decode", batch=batch, ms=median * 1e3, best_ms=best * 1e3, tok_s=batch / median, best_tok_s=batch / best,
             weights_gb_s=model.bytes / best / 1e9)
    for tokens in (128, 512):
        run = model.step([(tokens, tokens)], 1)
        median, best = timed(run, 1.0 if quick else 4.0, 2)
        show(step="prefill", tokens=tokens, ms=median * 1e3, best_ms=best * 1e3, tok_s=tokens / median,
             best_tok_s=tokens / best, gflop_s=2 * products * tokens / best / 1e9)


def operations(kernels: Kernels, dtype: torch.dtype, seconds: float) -> None:
    linear = kernels.linear
    size = torch.empty(0, dtype=dtype).element_size()
    for n, k in ((2560, 2048), (2048, 2048), (11264, 2048), (2048, 5632), (32000, 2048)):
        copies = [linear.pack(torch.randn(n, k).to(dtype)) for _ in range(max(1, (600 << 20) // (n * k * size)))]
        for rows in (1, 2, 4, 8, 16, 32, 64, 512):
            x = torch.randn(rows, k).to(dtype)
            at = iter(range(1 << 60))
            median, best = timed(lambda c=copies, x=x, at=at: linear.apply(x, c[next(at) % len(c)]), seconds)
            show(op="linear", n=n, k=k, rows=rows, us=median * 1e6, best_us=best * 1e6, gb_s=n * k * size / best / 1e9,
                 gflop_s=2 * n * k * rows / best / 1e9)
    for context, queries, rows in ((128, 1, 1), (128, 1, 16), (2048, 1, 1), (8192, 1, 1), (8192, 1, 8), (512, 512, 1),
                                   (4096, 512, 1)):
        for heads, kv, width in ((32, 4, 64), (32, 8, 128)):
            columns = context // 16
            cache = torch.randn(rows * columns, 2, kv, 16, width).to(dtype)
            q = torch.randn(rows * queries, heads, width).to(dtype)
            arguments = (q, cache[:, 0], cache[:, 1], torch.arange(rows * columns).view(rows, -1).int(),
                         (torch.arange(rows + 1) * queries).int(), torch.full((rows,), context).int(), width ** -0.5)
            median, best = timed(lambda a=arguments: kernels.attention.apply(*a), seconds)
            pairs = rows * queries * (context - (queries - 1) / 2)
            show(op="attention", context=context, queries=queries, rows=rows, heads=heads, kv=kv, size=width, us=median * 1e6,
                 best_us=best * 1e6, gb_s=cache.nbytes / best / 1e9, gflop_s=4 * pairs * heads * width / best / 1e9)
    for rows in (1, 16, 512):
        x, w = torch.randn(rows, 2048).to(dtype), torch.ones(2048, dtype=dtype)
        wide = torch.randn(rows, 11264).to(dtype)
        tiny, small = torch.randn(rows, 64).to(dtype), torch.ones(64, dtype=dtype)
        for name, call in (("rms_norm", lambda x=x, w=w: kernels.rms_norm(x, w, 1e-5)),
                           ("add_rms_norm", lambda x=x, w=w: kernels.add_rms_norm(x, x, w, 1e-5)),
                           ("gated", lambda wide=wide: kernels.gated(wide, "silu")),
                           ("rms_norm of 64", lambda x=tiny, w=small: kernels.rms_norm(x, w, 1e-5))):
            median, best = timed(call, seconds / 2)
            show(op=name, rows=rows, us=median * 1e6, best_us=best * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--isa", choices=[i.name for i in native.INSTRUCTION_SETS])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--steps-only", action="store_true")
    options = parser.parse_args()
    if options.isa:
        os.environ["PENSTOCK_CPU_ISA"] = options.isa
    torch.set_num_threads(options.threads)
    native.set_threads(options.threads)
    facts, dtype = detect("cpu"), getattr(torch, options.dtype)
    kernels = bind(facts, dtype)
    show(cpu=facts.name, cores=facts.cores, threads=options.threads, python=platform.python_version(), torch=torch.__version__,
         dtype=options.dtype, kernels=dict(kernels.table()), load=os.getloadavg()[0])
    with torch.inference_mode():
        if not options.steps_only:
            ceilings(kernels)
            operations(kernels, dtype, 0.1 if options.quick else 0.5)
        steps(kernels, dtype, options.quick)


if __name__ == "__main__":
    main()
