"""Products of quantized matrices on NVIDIA GPUs, which are read as they are stored: Triton kernels for few rows and for scales
of groups; for many rows cuBLAS, after decoding the matrix if its codes are no numbers of the tensor cores.

`pick` alone decides which kernel and tile serve a shape. The forms that matrices are packed into are in ops/coded_forms.py, the
kernels in ops/coded_kernels.py."""

import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from penstock.ops import gpu, rows_triton
from penstock.ops.coded_forms import FP8, MOST, NAMES, CodedWeight, coded, codes_of, empty_codes
from penstock.ops.linear_triton import Tile, parts_of, tickets_of
from penstock.ops.table import register

kernels, plain, mixed = gpu.Kernels("coded_kernels"), gpu.Kernels("linear_kernels"), gpu.Kernels("mixed_kernels")

MANY = Tile(128, 128, 1, warps=8, stages=3, group=8)
"""For many rows. Here `Tile.deep` counts units of the matrix's columns."""


def parts(weight: CodedWeight, gated: bool) -> int:
    """Split-K parts: more than one where few output columns make too few programs to saturate memory."""
    n, split = weight.n // 2 if gated else weight.n, 1
    if weight.kind == "plain" and n > 64 * 79 and weight.padded <= 8192:
        return 1  # adding parts takes longer than more programs save
    while -(-n // 64) * split < 192 and weight.padded // split >= 1024:
        split *= 2
    return split


def fitting(weight: CodedWeight, deep: int) -> int:
    """Units of a step along K of at most `deep` columns."""
    count = max(1, deep // weight.unit)
    while weight.padded % (count * weight.unit):
        count //= 2
    return count


def few(rows: int, weight: CodedWeight, gated: bool) -> Tile:
    """The tile for up to 64 rows: the matrix is the tensor core's operand of 64 rows."""
    tall = max(16, gpu.covering(rows))
    units = fitting(weight, 256 if weight.four else 128)
    stages = 3 if rows > 16 or weight.n <= 4096 else 4
    if not weight.four:
        stages = (8 if weight.kind == "plain" else 5) if rows <= 32 else 6
    if weight.scales > 1 or weight.kind == "table4":
        stages = 3
    return Tile(tall, 64, units, parts(weight, gated), stages=stages)


def pick(rows: int, weight: CodedWeight, gated: bool) -> Tile | None:
    """The tile for x [rows, k] times the matrix; None selects the library."""
    if rows <= 64:
        return few(rows, weight, gated)
    if weight.kind == "plain":
        if weight.data.dtype is FP8 and (weight.form == "row" or weight.blocks is not None):
            return None
        programs = -(-weight.n // 64) * -(-rows // 128)
        few_programs = Tile(128, 64, 1, 2 if programs <= 64 else 1)
        return few_programs if programs <= 256 and not gated else MANY
    if weight.four or rows > (128 if weight.n <= 4096 else 256):
        return None
    programs = -(-weight.n // 64) * -(-rows // 128)
    return MANY if gated else Tile(128, 64, 1, 1 if programs > 128 else 2 if programs > 64 else 4, stages=3, group=8)


def pick_invariant(rows: int, weight: CodedWeight, gated: bool) -> Tile:
    """The same where bits must not depend on the number of rows: K is divided as the matrix alone says."""
    cut = few(min(rows, 64), weight, gated)
    if rows <= 64 or (cut.split > 1 and rows <= 256):
        return cut._replace(tall=min(64, gpu.covering(max(16, rows))))
    if cut.split == 1:
        return MANY
    return Tile(128, 64, 1, cut.split, stages=3, group=8, joined=True)


def aligned(x: torch.Tensor) -> int:
    """Elements by whose multiples x's rows lie apart, for vectorised loads."""
    return math.gcd(16, x.stride(0)) if x.shape[0] > 1 else 16


def launch(cut: Tile, x: torch.Tensor, xs: torch.Tensor | None, weight: CodedWeight, bias: torch.Tensor | None,
           dtype: torch.dtype, gate: str | None = None) -> torch.Tensor:
    """The product by Triton, plus bias, in `dtype`; with a gate, gated in the epilogue (half of n a multiple of 64)."""
    rows, n = x.shape[0], weight.n if gate is None else weight.n // 2
    out = torch.empty(rows, n, dtype=dtype, device=x.device)
    count = -(-n // cut.wide) * -(-rows // cut.tall)
    if count == 0:
        return out
    programs, partial, tickets = parts_of(cut, count, out, gate is not None,
                                          torch.int32 if x.dtype is torch.int8 else torch.float32)
    assert cut.split == 1 or 256 % (cut.deep * weight.unit) == 0, "parts of K begin at multiples of 256"
    align = aligned(x)
    kernels.product[(count, programs)](
        x, xs, weight.data, weight.words, weight.gains, weight.table, bias, out, partial, tickets, rows, n, weight.k,
        x.stride(0) // align, weight.padded, weight.spread, tall=cut.tall, wide=cut.wide, unit=weight.unit, count=cut.deep,
        split=cut.split, joined=cut.joined, even=weight.k == weight.padded, align=align, group=cut.group,
        kind=weight.kind, form=weight.form, half=weight.half, scales=weight.scales, scaled=weight.scaled,
        four=weight.four, gate=gate, stages=cut.stages, fast=x.device.type != "cpu", num_warps=cut.warps,
        num_stages=cut.stages, **gpu.linked(x.device))
    return out


def fragment(rows: int, weight: CodedWeight, gated: bool) -> tuple[int, int, int, int, int | None]:
    """The cut of `launch_fragments` for up to 8 rows: rows of x in an operand, groups of 16 rows of the matrix, warps,
    steps read ahead, and the registers of a thread (None: as many as it takes)."""
    most = 128 if weight.scales == 1 else None
    if gated:
        return (2, 1, 4, 1, most and 168) if rows <= 2 else (8, 2, 4, 1, None)
    if weight.k > 8192:
        return (4, 1, 8, 2, most) if rows <= 4 else (8, 2, 16, 1, most)
    if rows == 1:  # one step: all codes are read before the wait for x
        return 1, 1, min(8, gpu.covering(max(2, -(-weight.padded // 1024)))), 1, most if weight.n > 4096 else None
    if rows == 2:
        return 2, 1, 4, 1, most
    return (8, 1, 4, 4, None) if weight.n > 4096 else (8, 1, 8, 2, most)


def launch_fragments(x: torch.Tensor, weight: CodedWeight, bias: torch.Tensor | None, dtype: torch.dtype,
                     gate: str | None = None, cut: tuple[int, int, int, int, int | None] | None = None) -> torch.Tensor:
    """The product of at most 8 rows with a matrix of 4-bit integers by tensor cores fed from registers: `fragmented` says of
    which. cut: as of `fragment`."""
    rows, n = x.shape[0], weight.n if gate is None else weight.n // 2
    tall, groups, span, ahead, most = cut or fragment(rows, weight, gate is not None)
    out = torch.empty(rows, n, dtype=dtype, device=x.device)
    kernels.fragments[(-(-n // (16 * groups)),)](
        x, weight.data.view(torch.int32), weight.words, weight.gains, bias, out, rows, n, weight.k, weight.padded,
        weight.spread, x.stride(0) // 8, tall=tall, groups=groups, span=span, ahead=ahead,
        once=weight.padded // 128 <= span * 8 // tall, scales=weight.scales, form=weight.form, half=weight.half,
        gate=gate, fast=x.device.type != "cpu", num_warps=span, num_stages=1, maxnreg=most, **gpu.linked(x.device))
    return out


def fragmented(x: torch.Tensor, weight: CodedWeight) -> bool:
    """Whether `launch_fragments` serves: for 4-bit integers, and rows of 16-bit numbers that lie at multiples of 16 bytes."""
    return (x.shape[0] <= 8 and weight.kind == "int4" and x.dtype != torch.float32 and x.data_ptr() % 16 == 0
            and weight.k % 8 == 0 and (x.shape[0] == 1 or x.stride(0) % 8 == 0))


def launch_codes(x: torch.Tensor, weight: CodedWeight, bias: torch.Tensor | None, dtype: torch.dtype,
                 gate: str | None = None) -> torch.Tensor:
    """The product of one row with FP8 codes that have no scales but of rows, without tensor cores: `readable` says of which."""
    n, k = weight.n if gate is None else weight.n // 2, weight.k
    out = torch.empty(1, n, dtype=dtype, device=x.device)
    v, scale = codes_of(x, weight) or (x, weight.input_scale)
    rounding = weight.scaled != "none" and v.dtype is not FP8
    paired = (rounding or v.dtype is FP8) and x.device.type != "cpu"
    deepest = (8, 1024, 2, 4, 2) if paired else (4, 2048, 4, 4, 2)
    wide, deep, warps, stages, ahead = deepest if k > 8192 else (4 if gate is not None else 8, 512, 2, 6, 4)
    if paired and rounding and 4096 <= k <= 8192:
        deep, warps = 1024, 4
    deep = min(deep, gpu.covering(k))
    paired = paired and deep >= 256 * warps  # a thread has eight columns of a row
    plain.matvec[(-(-n // wide),)](
        v, weight.data, weight.gains, scale, bias, out, n, k, wide=wide, deep=deep, stages=stages,
        ahead=min(ahead, k // deep), even=k % deep == 0, kind=gate, whole=gpu.covering(k), paired=paired,
        most=MOST[FP8] if rounding else 0.0, num_warps=warps, num_stages=stages, **gpu.linked(x.device))
    return out


def launch_mixed(x: torch.Tensor, weight: CodedWeight, bias: torch.Tensor | None, dtype: torch.dtype,
                 gate: str | None = None) -> torch.Tensor:
    """The product with a matrix of 4-bit codes, decoded into the tensor cores' registers: `mixable` says of which."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    rows, n, size = x.shape[0], weight.n if gate is None else weight.n // 2, weight.unit // 4
    out = torch.empty(rows, n, dtype=dtype, device=x.device)
    total, layout = weight.padded // weight.unit, NVMMASharedLayout(2 * size, 16, 2)
    tall, count, split, stages = mixture(rows, weight, gate is not None)
    programs, partial, tickets = parts_of(Tile(tall, 64, 1, split), count * 2, out, False)
    mixed.mixed[(count, programs)](
        TensorDescriptor.from_tensor(x, [tall, size], layout),
        TensorDescriptor.from_tensor(weight.data.view(torch.int16).view(-1, size), [64, size], layout),
        weight.words, weight.gains, bias, out, partial, tickets, rows, n, total, weight.spread, split=split, stages=stages,
        kind=weight.kind, form=weight.form, half=weight.half, scales=weight.scales, gate=gate, num_warps=4,
        **gpu.linked(x.device))
    return out


def mixture(rows: int, weight: CodedWeight, gated: bool) -> tuple[int, int, int, int]:
    """The cut of `launch_mixed`: rows of x in a program, tiles, parts of K, and stages."""
    tall, split = max(32, min(128, gpu.covering(rows))), 1
    count = -(-(weight.n // 2 if gated else weight.n) // 128) * -(-rows // tall)
    while not gated and count * split * 2 <= gpu.MULTIPROCESSORS and weight.padded // weight.unit // split >= 8:
        split *= 2
    return tall, count, split, (3 if gated else 4) * 128 // weight.unit


def mixes(rows: int, weight: CodedWeight, gated: bool) -> bool:
    """Whether `launch_mixed` is faster than what serves else, by microseconds as bench/notes.md has them of an H200."""
    if rows <= 64 or rows > 1024:
        return 32 < rows <= 64 or (16 < rows <= 32 and not gated)
    _, count, split, _ = mixture(rows, weight, gated)
    turns, size = -(-count * split // gpu.MULTIPROCESSORS), weight.n * weight.padded / 1e6
    unit = 1.2 if weight.unit == 64 or weight.form == "shifts" else 1.0 if weight.kind == "e2m1" else 0.84
    ours = 3 + (7 if split > 1 else 0) + unit * (2 if gated else 1) * turns * -(-weight.padded // (128 * split))
    return ours <= 2 + max(3, 0.62 * size) + max(4, 0.48 * size, size * rows / 355)  # decoding, and cuBLAS


def mixable(x: torch.Tensor, weight: CodedWeight) -> bool:
    """Whether `launch_mixed` can serve: on Hopper alone, whose wgmma it needs."""
    return (weight.kind in ("int4", "e2m1") and gpu.capability(x.device) == (9, 0) and x.dtype != torch.float32
            and x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0)


def readable(x: torch.Tensor, weight: CodedWeight) -> bool:
    """Whether `launch_codes` serves."""
    return (x.shape[0] == 1 and weight.data.dtype is FP8 and weight.form == "row" and weight.order is None
            and weight.k == weight.padded)


def quantized(x: torch.Tensor, weight: CodedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """x's codes, and their scales: as they came with x, or by a kernel of their own."""
    found = codes_of(x, weight)
    if found is not None:
        return found
    rows, k = x.shape
    codes, scales = empty_codes(rows, weight)
    if rows == 0:
        return codes, scales
    align, block = aligned(x), gpu.covering(weight.span)
    kernels.quantize[(rows, len(scales))](
        x, codes, scales, weight.input_scale, x.stride(0) // align, k, block=block, span=weight.span, align=align,
        most=MOST[codes.dtype], num_warps=max(1, min(16, block // 256)), **gpu.linked(x.device))
    return codes, scales


def decoded(weight: CodedWeight, dtype: torch.dtype, ids: torch.Tensor | None = None) -> torch.Tensor:
    """The matrix [n, k], or rows `ids` [T] of it, stored columns in order, rounded to `dtype`."""
    n = weight.n if ids is None else len(ids)
    out = torch.empty(n, weight.k, dtype=dtype, device=weight.data.device)
    if n:
        kernels.decode[(-(-n // 64), weight.padded // weight.unit * weight.scales)](
            weight.data, weight.words, weight.gains, weight.table, ids, out, n, weight.k, weight.padded, weight.spread,
            unit=weight.unit, kind=weight.kind, form=weight.form, half=weight.half, scales=weight.scales, four=weight.four,
            num_warps=4)
    return out


def _scaled(x: torch.Tensor, weight: CodedWeight, left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The product of FP8 codes times their factors; unless of blocks, sums are as precise as tensor cores' own."""
    if x.is_meta:  # a rehearsal: for its shapes torch would import sympy, which takes a second or two
        return torch.empty(x.shape[0], weight.n, dtype=dtype, device=x.device)
    return torch._scaled_mm(x, weight.data.t(), left, right, out_dtype=dtype,  # noqa: SLF001
                            use_fast_accum=weight.blocks is None)


def _library(x: torch.Tensor, xs: torch.Tensor | None, weight: CodedWeight, bias: torch.Tensor | None,
             dtype: torch.dtype, gate: str | None) -> torch.Tensor:
    """The product by cuBLAS or CUTLASS, with a gate gated."""
    if xs is None:
        out = F.linear(x, decoded(weight, x.dtype), bias)
    elif weight.blocks is None and bias is None and (len(x) <= 192 or (len(x) <= 768 and weight.k > 8192)):
        # Faster than with factors (decision 0310). Gated, the product is rounded to bfloat16 before them instead of after them.
        out = _scaled(x, weight, _one(x.device), _one(x.device), torch.bfloat16 if gate else torch.float32)
        return rows_triton.scaled(out, xs[0], _gains(weight), dtype, gate, weight.reader)
    else:
        # With factors of blocks cuBLAS takes rows by multiples: of 65 it said that they are not supported.
        rows, missing = len(x), 0 if weight.blocks is None else -len(x) % 16
        if missing:
            x, xs = F.pad(x.view(torch.uint8), (0, 0, 0, missing)).view(x.dtype), F.pad(xs, (0, missing))
        # Its scales of units and blocks come with their longer axis last: [rows, units] and [units, blocks], both transposed.
        right = _gains(weight)[None] if weight.blocks is None else weight.blocks.t()
        out = _scaled(x, weight, xs.t(), right, torch.bfloat16)[:rows]
        out = out if bias is None else out + bias
    return out.to(dtype) if gate is None else rows_triton.gated(out.to(dtype), gate, weight.reader)


class CodedTriton:
    """LinearOps (ops/linear.py), for any scheme of `NAMES`."""

    def __init__(self, invariant: bool) -> None:
        self._invariant = invariant
        self._pick = pick_invariant if invariant else pick

    @staticmethod
    def pack(scheme: Any, stored: Any, shape: tuple[int, ...], dtype: torch.dtype) -> CodedWeight:
        weight = coded(scheme, stored, shape, dtype)
        if weight.data.is_cuda:
            tickets_of(weight.data.device)  # before any graph is captured
            _blockwise(weight.data.device)
            _one(weight.data.device)
        return weight

    def _product(self, x: torch.Tensor, weight: CodedWeight, bias: torch.Tensor | None, dtype: torch.dtype,
                 gate: str | None = None) -> torch.Tensor:
        if weight.order is not None:
            x = x.index_select(1, weight.order)
        # Halves that no panel divides are gated apart.
        fused = gate if weight.n % 128 == 0 else None
        special = None
        if not self._invariant and x.shape[0]:
            special = (launch_fragments if fragmented(x, weight) else launch_codes if readable(x, weight)
                       else launch_mixed if mixable(x, weight) and mixes(len(x), weight, gate is not None) else None)
        if special is not None:
            y = special(x, weight, bias, dtype, fused)
        else:
            cut = self._pick(x.shape[0], weight, gate is not None)
            codes, scales = (x, None) if weight.scaled == "none" else quantized(x, weight)
            if cut is None and (scales is None or _scalable(weight, dtype)):
                return _library(codes, scales, weight, bias, dtype, gate)
            y = launch(cut or MANY, codes, scales, weight, bias, dtype, fused)
        return y if gate is None or fused is not None else rows_triton.gated(y, gate, weight.reader)

    def apply(self, x: torch.Tensor, weight: CodedWeight, bias: torch.Tensor | None = None,
              out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._product(x, weight, bias, x.dtype if out_dtype is None else out_dtype)

    def gated(self, x: torch.Tensor, weight: CodedWeight, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
        return self._product(x, weight, bias, x.dtype, kind)

    @staticmethod
    def gather(ids: torch.Tensor, weight: CodedWeight) -> torch.Tensor:
        found = decoded(weight, weight.dtype, ids.contiguous())
        return found if weight.order is None else torch.empty_like(found).index_copy_(1, weight.order, found)


def _gains(weight: CodedWeight) -> torch.Tensor:
    assert weight.gains is not None, "a matrix without blocks has factors of rows"
    return weight.gains


@cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones((), device=device)


@cache
def _blockwise(device: torch.device) -> bool:
    """Whether torch's library has products with scales of blocks here: it needs Hopper and a CUDA of at least 12.9."""
    if device.type != "cuda":
        return gpu.capability(device) == (9, 0)
    codes, scales = torch.zeros(128, 128, dtype=torch.uint8, device=device).view(FP8), torch.ones(1, 128, device=device)
    try:
        torch._scaled_mm(codes, codes.t(), scales.t(), scales[:, :1].t(), out_dtype=torch.bfloat16)  # noqa: SLF001
    except (RuntimeError, ValueError):
        return False
    return True


def _scalable(weight: CodedWeight, dtype: torch.dtype) -> bool:
    """Whether the library's product of FP8 codes can serve."""
    if weight.blocks is not None and not _blockwise(weight.data.device):
        return False
    return weight.data.dtype is FP8 and weight.k == weight.padded and dtype is torch.bfloat16 and weight.n % 16 == 0


for _name in NAMES:
    register(f"linear.{_name}", "triton", rank=10, supports=gpu.supports, batch_invariant=False)(CodedTriton(False))
    register(f"linear.{_name}", "triton-invariant", rank=5, supports=gpu.supports)(CodedTriton(True))
