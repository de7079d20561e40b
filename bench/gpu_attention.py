"""Attention on a GPU: bandwidth of decode, arithmetic of prompts, beside the card's ceilings and cuDNN.

usage: gpu_attention.py [--only WORD] [--part KEYS] [--sweep narrow,broad,fixed,tall] [--invariant] [--json FILE]

Times are those of CUDA graphs that attend over several caches in turn, more than 300 MB together, so that L2 (60 MB) holds none
of them, as the layers of a model would. Bytes are the keys and values that queries see, once for each KV head, and those that
segments share once for all of them; cases in which segments share are measured also with each reading alone. Operations are
those of the causal triangle alone. `--sweep` tries other shapes of tiles than those that ops/attention_work.py takes. Prints a
table; the record goes to --json or $OUT.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import triton

from gpu_time import copy_bandwidth, graph_us
from penstock.cli.bench.environment import environment
from penstock.ops import attention_sharing, attention_work
from penstock.ops.attention import AttentionOps, Geometry, SharedPrefixes, Span
from penstock.ops.attention_triton import INVARIANT, TRITON, TritonAttention
from penstock.ops.attention_work import Shape
from penstock.ops.compile import Compilation, recording, watch
from penstock.ops.gpu import chip

LLAMA = Geometry(32, 8, 128, 16)
QWEN = Geometry(16, 8, 128, 16)
PEAK = 800e12
"""bf16 operations a second of cuBLAS at its best on an H200."""


@dataclass
class Case:
    """A step of segments (context, queries)."""

    name: str
    segments: list[tuple[int, int]]
    geometry: Geometry = LLAMA
    softcap: float = 0.0
    shared: int = 0
    """Positions whose pages segments share, all of them"""
    groups: int = 1
    """or those of each of so many groups of neighbours."""

    @property
    def decode(self) -> bool:
        return all(count == 1 for _, count in self.segments)

    def bytes(self) -> int:
        g = self.geometry
        seen = sum(min(context, g.window + count - 1) if g.window else context for context, count in self.segments)
        return 2 * g.itemsize * g.kv_heads * g.head_size * (seen - self.shared * (len(self.segments) - self.groups))

    def prefixes(self) -> SharedPrefixes | None:
        """The result of `worker/sharing.py`."""
        if not self.shared:
            return None
        common = np.full(len(self.segments), self.shared, np.int32)
        common[len(common) // self.groups - 1::len(common) // self.groups] = 0
        return SharedPrefixes(np.arange(len(common), dtype=np.int32), common[:-1])

    def operations(self) -> int:
        g, pairs = self.geometry, 0
        for context, count in self.segments:
            seen = np.arange(context - count + 1, context + 1)
            pairs += int((np.minimum(seen, g.window) if g.window else seen).sum())
        return 4 * g.heads * g.head_size * pairs


def ragged(count: int) -> list[tuple[int, int]]:
    """Contexts of a busy server: many short, few long."""
    lengths = np.random.default_rng(0).lognormal(6.5, 1.2, count).clip(16, 32768).astype(int)
    return [(int(length), 1) for length in lengths]


DECODE = [Case("b1 128", [(128, 1)]), Case("b1 400", [(400, 1)]), Case("b1 400 qwen", [(400, 1)], QWEN),
          Case("b1 2k", [(2048, 1)]), Case("b1 32k", [(32768, 1)]), Case("b1 128k", [(131072, 1)]),
          Case("b8 600", [(600, 1)] * 8), Case("b8 600 qwen", [(600, 1)] * 8, QWEN), Case("b8 32k", [(32768, 1)] * 8),
          Case("b8 128k", [(131072, 1)] * 8), Case("b32 600", [(600, 1)] * 32), Case("b40 2k", [(2048, 1)] * 40),
          Case("b64 2k", [(2048, 1)] * 64), Case("b128 600", [(600, 1)] * 128), Case("b256 600", [(600, 1)] * 256),
          Case("b64 ragged", ragged(64)),
          Case("b63 600 and one of 128k", [(600, 1)] * 63 + [(131072, 1)])]
SHARED = [Case(f"b{count} {shared} shared by {count // groups}{name}", [(shared + 160, 1)] * count, geometry, shared=shared,
               groups=groups)
          for geometry, name in ((QWEN, " qwen"), (LLAMA, ""), (Geometry(64, 8, 128, 16), " group 8"))
          for count, shared, groups in ((64, 4096, 1), (256, 1024, 1), (64, 512, 1), (64, 128, 1), (8, 4096, 1), (8, 512, 1),
                                        (2, 4096, 1), (2, 512, 1), (64, 2048, 8), (64, 2048, 32))]
"""From beginnings that surely pay to those that hardly do. With `--part 0` all are attended to together: where the two columns
cross is what `PART` in ops/attention_sharing.py should say."""
PROMPT = [Case("8k", [(8192, 8192)]), Case("4 x 2k", [(2048, 2048)] * 4), Case("16 x 512", [(512, 512)] * 16),
          Case("2k after 6k", [(8192, 2048)]), Case("512 after 32k", [(33280, 512)]), Case("100 after 32k", [(32868, 100)]),
          Case("chunk 8k after 24k", [(32768, 8192)]), Case("chunk 4k after 28k", [(32768, 4096)]),
          Case("chunk 5k after 24,111", [(29111, 5000)]), Case("chunk 8k after 112k", [(122880, 8192)])]
SHAPES = [Case("head 64: b32 2k", [(2048, 1)] * 32, Geometry(32, 8, 64, 16)),
          Case("head 256: b32 2k", [(2048, 1)] * 32, Geometry(16, 8, 256, 16)),
          Case("head 96: b32 2k", [(2048, 1)] * 32, Geometry(32, 32, 96, 16)),
          Case("group 1: b32 2k", [(2048, 1)] * 32, Geometry(16, 16, 128, 16)),
          Case("group 8: b8 8k", [(8192, 1)] * 8, Geometry(64, 8, 128, 16)),
          Case("window 1k: b32 8k", [(8192, 1)] * 32, Geometry(32, 8, 128, 16, 1024)),
          *(Case(f"chunk, head {size}: 8k after 24k", [(32768, 8192)], Geometry(heads, kv_heads, size, 16))
            for size, heads, kv_heads in ((64, 32, 8), (96, 32, 32), (192, 16, 8), (256, 16, 8))),
          Case("chunk, window 4k: 8k after 24k", [(32768, 8192)], Geometry(32, 8, 128, 16, 4096)),
          Case("chunk, softcap: 8k after 24k", [(32768, 8192)], Geometry(32, 8, 128, 16), 50.0),
          Case("head 64: 8k", [(8192, 8192)], Geometry(32, 8, 64, 16)),
          Case("head 256: 4k", [(4096, 4096)], Geometry(16, 8, 256, 16)),
          Case("window 1k: 8k", [(8192, 8192)], Geometry(32, 8, 128, 16, 1024)),
          Case("softcap, head 256: 4k", [(4096, 4096)], Geometry(16, 8, 256, 16), 50.0)]

SWEPT = ("b1 128", "b1 400", "b1 2k", "b1 128k", "b8 600", "b32 600", "b64 ragged")
NARROW = [(64, 4, 3, 2), (64, 4, 4, 2), (64, 8, 4, 1), (128, 8, 3, 1), (128, 8, 2, 1), (128, 4, 3, 1), (256, 8, 2, 1)]
"""(block of keys, warps, stages, programs a multiprocessor) to try at heads of 128."""
BROAD = [(128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 4, 3)]
"""(rows, block of keys, warps, stages) to try at heads of 128."""
TALL = [(16, 64, 4, 3, 3), (32, 64, 4, 3, 2), (32, 64, 8, 3, 1), (64, 64, 8, 3, 1)]
"""(rows, block of keys, warps, stages, programs a multiprocessor) to try for tiles of several segments, beside what they cost
segments that share nothing."""
FIXED = [(64, 4, 3, 1), (64, 4, 2, 2), (64, 4, 4, 1), (64, 4, 2, 1)]
"""As NARROW, for the batch-invariant kernel, whose block of keys is that of its broad tiles."""


@dataclass
class Built:
    """A case on the device: queries, and caches with their tables."""

    case: Case
    copies: int = 0
    exact: torch.Tensor | None = None

    def __post_init__(self) -> None:
        g, segments = self.case.geometry, self.case.segments
        columns = -(-max(context for context, _ in segments) // g.page)
        used = [-(-context // g.page) for context, _ in segments]
        self.copies = min(64, max(2, -(-(320 << 20) // self.case.bytes()))) if self.case.decode else 2
        pages = sum(used)
        self.arena = torch.randn(self.copies * pages, 2, g.kv_heads, g.page, g.head_size, device="cuda", dtype=torch.bfloat16)
        order = torch.randperm(self.copies * pages, device="cuda", dtype=torch.int32).view(self.copies, pages)
        self.tables = torch.zeros(self.copies, len(segments), columns, device="cuda", dtype=torch.int32)
        at = 0
        for s, count in enumerate(used):
            self.tables[:, s, :count] = order[:, at:at + count]
            at += count
        shared = self.case.shared // g.page
        for group in np.array_split(np.arange(len(segments)), self.case.groups):
            self.tables[:, group, :shared] = self.tables[:, group[:1], :shared]
        self.counts = np.array([count for _, count in segments], np.int32)
        self.context = np.array([context for context, _ in segments], np.int32)
        self.tokens = int(self.counts.sum())
        self.q = torch.randn(self.tokens, g.heads, g.head_size, device="cuda", dtype=torch.bfloat16)
        self.query_start = torch.tensor(np.concatenate(([0], self.counts.cumsum())), device="cuda", dtype=torch.int32)
        self.context_there = torch.from_numpy(self.context).cuda()

    def run(self, attention: AttentionOps, copy: int, work: torch.Tensor | None, library: Sequence[Span] = ()) -> torch.Tensor:
        g = self.case.geometry
        return attention.apply(self.q, self.arena[:, 0], self.arena[:, 1], self.tables[copy], self.query_start,
                               self.context_there, g.head_size ** -0.5, g.window, self.case.softcap, work=work, library=library)

    def measure(self, attention: TritonAttention, named: bool = True, alone: bool = False) -> tuple[float, float]:
        """Microseconds, and the relative error beside the reference in float32, of a few queries where there are many.

        named: whole prompts are named, as in eager steps. alone: each segment reads by itself what it shares.
        """
        geometry = dataclasses.replace(self.case.geometry, plain=not self.case.softcap)
        library = attention.library_spans(geometry, self.counts, self.context) if named else []
        found = attention.prepare(geometry, self.counts, self.context, len(self.counts), self.tokens, library,
                                  None if alone else self.case.prefixes())
        work = torch.from_numpy(found).cuda()
        error = self.error(self.run(attention, 0, work, library))
        return graph_us([lambda copy=copy: self.run(attention, copy, work, library) for copy in range(self.copies)]), error

    def error(self, found: torch.Tensor) -> float:
        g = self.case.geometry
        s = int(self.context.argmax())
        end = int(self.query_start[s + 1])
        count = min(64, int(self.counts[s]))
        table = self.tables[0, s:s + 1]
        if self.exact is None:
            self.exact = AttentionOps().apply(self.q[end - count:end].float(), self.arena[:, 0], self.arena[:, 1], table,
                                            torch.tensor([0, count]), self.context_there[s:s + 1], g.head_size ** -0.5,
                                            g.window, self.case.softcap)
        return float((found[end - count:end].float() - self.exact).norm() / self.exact.norm())


@contextmanager
def shaped(narrow: Shape | None = None, broad: Shape | None = None, joining: int = 0) -> Iterator[None]:
    """Other constants than those of ops/attention_work.py, in this context."""
    kept = attention_work.shapes, attention_work.JOINING

    def shapes(geometry: Geometry, segments: int, invariant: bool) -> tuple[Shape, Shape]:
        usual = kept[0](geometry, segments, invariant)
        return narrow or usual[0], broad or usual[1]

    attention_work.shapes, attention_work.JOINING = shapes, joining or kept[1]
    attention_work.layout.cache_clear()
    try:
        yield
    finally:
        attention_work.shapes, attention_work.JOINING = kept
        attention_work.layout.cache_clear()


def narrow_of(geometry: Geometry, block: int, warps: int, stages: int, resident: int, rows: int = 16) -> Shape:
    return Shape(rows, block, 16 // (geometry.heads // geometry.kv_heads), warps, stages, resident)


def tall_of(geometry: Geometry, rows: int, block: int, warps: int, stages: int, resident: int) -> Shape:
    return Shape(rows, block, rows // (geometry.heads // geometry.kv_heads), warps, stages, resident)


def broad_of(geometry: Geometry, rows: int, block: int, warps: int, stages: int) -> Shape:
    return Shape(rows, block, rows // (geometry.heads // geometry.kv_heads), warps, stages, 1)


def record_launches(attention: TritonAttention, case: Case) -> None:
    """Launches on meta tensors, for ops/compile."""
    g, tokens, segments = case.geometry, sum(count for _, count in case.segments), len(case.segments)
    layout = attention_work.layout(g, segments, tokens, attention.invariant)

    def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    arena = meta(4, 2, g.kv_heads, g.page, g.head_size, dtype=torch.bfloat16)
    library = [Span(0, 0, 8)] if not case.decode else []
    for named in ([], library):
        attention.apply(meta(tokens, g.heads, g.head_size, dtype=torch.bfloat16), arena[:, 0], arena[:, 1], meta(segments, 4),
                        meta(segments + 1), meta(segments), 0.1, g.window, case.softcap, work=meta(layout.size), library=named)


def compile_all(variants: list[tuple[TritonAttention, Case, dict[str, Any]]]) -> None:
    """Compiles on all cores what the timing will need."""
    watch()
    jobs = {}
    here = chip(torch.device("cuda"))
    with recording(here) as found:
        for attention, case, constants in variants:
            with shaped(**constants):
                record_launches(attention, case)
        jobs.update(found)
    compilation = Compilation(jobs.values(), here.capability)
    for job, why in compilation.wait():
        print("cannot compile", job.kernel, why.splitlines()[-1])
    print(f"{len(jobs)} kernels, {compilation.compiled} compiled")


def row(built: Built, us: float, error: float, bandwidth: float) -> dict[str, Any]:
    case = built.case
    rate = case.bytes() / us * 1e6 if case.decode else case.operations() / us * 1e6
    ceiling = bandwidth if case.decode else PEAK
    return {"case": case.name, "us": us, "rate": rate / (1e9 if case.decode else 1e12), "of_ceiling": rate / ceiling,
            "unit": "GB/s" if case.decode else "TFLOP/s", "error": error}


def table(attention: TritonAttention, cases: list[Case], bandwidth: float) -> list[dict[str, Any]]:
    rows = []
    for case in cases:
        built = Built(case)
        found = row(built, *built.measure(attention), bandwidth)
        rows.append(found)
        if case.shared:
            found["alone_us"] = built.measure(attention, alone=True)[0]
        print(f"{found['case']:26} {found['us']:9.2f} us {found['rate']:7.0f} {found['unit']:7} {found['of_ceiling']:4.0%}  "
              f"error {found['error']:.1e}" + (f"  alone {found['alone_us']:9.2f} us" if case.shared else ""), flush=True)
    return rows


def sweep(attention: TritonAttention, cases: list[Case], variants: dict[str, Callable[[Geometry], dict[str, Any]]],
          bandwidth: float) -> list[dict[str, Any]]:
    rows = []
    for case in cases:
        built = Built(case)
        found = []
        for name, constants in variants.items():
            try:
                with shaped(**constants(case.geometry)):
                    found.append({"variant": name, **row(built, *built.measure(attention, named=False), bandwidth)})
            except triton.runtime.errors.OutOfResources:
                continue
        found.sort(key=lambda entry: entry["us"])
        best = "; ".join(f"{e['us']:.2f} ({e['of_ceiling']:.0%}) {e['variant']}" for e in found[:7])
        print(f"{case.name:14} {best}", flush=True)
        rows += found
    return rows


def sdpa(heads: int, kv_heads: int, tokens: int, batch: int = 1) -> float | None:
    """Microseconds of cuDNN's causal attention on contiguous tensors, the heads of a group sharing theirs."""
    q = torch.randn(batch, tokens, heads, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    k, v = torch.randn(2, batch, tokens, kv_heads, 128, device="cuda", dtype=torch.bfloat16).transpose(2, 3)
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            return graph_us([lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)] * 4)
    except RuntimeError as error:
        print("cuDNN:", str(error).splitlines()[0])
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has this word, such as shared")
    parser.add_argument("--sweep", default="", help="narrow, broad, fixed, tall: other shapes of tiles to try")
    parser.add_argument("--invariant", action="store_true")
    parser.add_argument("--json", default=str(Path(os.environ["OUT"]) / "gpu_attention.json") if "OUT" in os.environ else "")
    parser.add_argument("--part", type=int, default=attention_sharing.PART, help="other costs of a part of a shared beginning")
    arguments = parser.parse_args()
    attention_sharing.PART = arguments.part
    torch.manual_seed(0)
    narrow = {"n{} w{} s{} r{}, {}".format(*one, joining):
              lambda g, one=one, joining=joining: {"narrow": narrow_of(g, *one), "joining": joining}
              for one in NARROW for joining in (16, 64)}
    broad = {"{}x{} w{} s{}".format(*one): lambda g, one=one: {"broad": broad_of(g, *one)} for one in BROAD}
    fixed = {"n{} w{} s{} r{}".format(*one): lambda g, one=one: {"narrow": narrow_of(g, *one, rows=64)} for one in FIXED}
    tall = {"{}x{} w{} s{} r{}".format(*one): lambda g, one=one: {"narrow": tall_of(g, *one)} for one in TALL}
    cases = [case for case in DECODE + SHARED + PROMPT + SHAPES if arguments.only in case.name]
    plans = [(TRITON, cases), (INVARIANT, cases if arguments.invariant else [])]
    variants: list[tuple[TritonAttention, Case, dict[str, Any]]] = [(a, case, {}) for a, cases in plans for case in cases]
    kept = [case for case in DECODE if case.name in SWEPT]
    many = [case for case in DECODE + SHARED if len(case.segments) >= 64 and case.geometry in (QWEN, LLAMA)]
    sweeps = {"narrow": (TRITON, kept, narrow), "broad": (TRITON, PROMPT, broad), "fixed": (INVARIANT, kept, fixed),
              "tall": (TRITON, many, tall)}
    swept = [name for name in arguments.sweep.split(",") if name]
    for name in swept:
        attention, cases, constants = sweeps[name]
        examples = {case.geometry: case for case in cases}
        variants += [(attention, case, make(g)) for g, case in examples.items() for make in constants.values()]
    compile_all(variants)
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e9:.0f} GB/s")
    record: dict[str, Any] = {"environment": environment(), "copy_gb_s": bandwidth / 1e9}
    for attention, cases in plans:
        if cases:
            name = "invariant" if attention.invariant else "triton"
            print(name)
            record[name] = table(attention, cases, bandwidth)
    record["cudnn_us"] = {name: sdpa(*shape) for name, shape in
                          {"8k": (32, 8, 8192), "4 x 2k": (32, 8, 2048, 4), "16 x 512": (32, 8, 512, 16)}.items()}
    print("cuDNN, contiguous:", record["cudnn_us"])
    for name in swept:
        record[f"sweep of {name}"] = sweep(*sweeps[name], bandwidth)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
