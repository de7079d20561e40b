"""Operations on the rows of a step on NVIDIA GPUs, each in one launch. This module chooses grids and blocks."""

import math
from collections.abc import Sequence

import torch

from penstock.ops import gpu, routing
from penstock.ops.attention_work import FIELDS, WorkItem
from penstock.ops.coded_forms import attached
from penstock.ops.latent import HeadLinearOps
from penstock.ops.linear import Weight
from penstock.ops.routing import Routing
from penstock.ops.step import GroupStep, Moving, StepTensors
from penstock.ops.table import register

kernels, _activation = gpu.Kernels("rows_kernels"), gpu.Kernels("activation_kernel")
_COPIED = 2048


def gather(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Embedding look-up: rows `ids` [T] (int32 or int64) of the contiguous `table` [N, K]: [T, K]. Ids outside of the table are
    not checked.

    Never uses programmatic dependent launch: kernels after it rely on all before it having ended (`rope_write` does)."""
    rows, width = len(ids), table.shape[1]
    out = torch.empty(rows, width, dtype=table.dtype, device=table.device)
    if rows == 0:
        return out
    block = min(_COPIED, gpu.covering(width))
    kernels.gather[(rows, -(-width // block))](ids, table, out, width=width, block=block,
                                               num_warps=max(1, min(8, block * table.element_size() // 512)))
    return out


_VECTOR = 16
"""Bytes of a row per thread, however many rows there are: how a row is divided over threads decides the order of its sum, and
so its bits. 32 bytes took the same time with 8,192 rows on an H200."""


def _normalised(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None,
                eps: float, offset: float, centred: bool, reader: Weight | None = None) -> torch.Tensor:
    """The norm of x [rows, width], or of the sums of x [rows, parts, width], + residual, contiguous; residual then holds the
    sum."""
    rows, width, parts, x = len(x), x.shape[-1], x.shape[1] if x.dim() > 2 else 1, x.flatten(0, -2)
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    block = gpu.covering(width)
    tall = max(1, 1024 // block)  # narrow rows share a program
    warps = min(16, max(1, tall * block * x.element_size() // (_VECTOR * 32)))
    stride = x.stride(0) if residual is None else residual.stride(0)
    align = math.gcd(16, x.stride(0), stride)
    codes, scales, fixed, span, most = attached(out, reader)
    kernels.normalise[(-(-rows // tall),)](
        x, residual, weight, bias, out, codes, scales, fixed, rows, x.stride(0) // align, stride // align, float(eps),
        float(offset), width=width, block=block, tall=tall, align=align, centred=centred, parts=parts, span=min(span, block),
        most=most, num_warps=warps, **gpu.linked(x.device))
    return out


@register("rms_norm", "triton", rank=10, supports=gpu.supports)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0,
             reader: Weight | None = None) -> torch.Tensor:
    out = _normalised(x.reshape(-1, x.shape[-1]), None, weight, None, eps, offset, False, reader)
    return out if x.dim() == 2 else out.view(x.shape)


@register("add_rms_norm", "triton", rank=10, supports=gpu.supports)
def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float,
                 offset: float = 0.0, reader: Weight | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return _normalised(x, residual, weight, None, eps, offset, False, reader), residual


@register("layer_norm", "triton", rank=10, supports=gpu.supports)
def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    return _normalised(x, None, weight, bias, eps, 0.0, True)


_ACTIVATED = 1024


def _activated(x: torch.Tensor, kind: str | None, gated: bool, reader: Weight | None = None,
               factors: Sequence[torch.Tensor | None] = (None, None), dtype: torch.dtype | None = None) -> torch.Tensor:
    """Where no GEMM epilogue computes them: each element is read and written once."""
    flat = x.reshape(-1, x.shape[-1])
    rows, width = flat.shape[0], flat.shape[1] // 2 if gated else flat.shape[1]
    out = torch.empty(*x.shape[:-1], width, dtype=dtype or x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    align = math.gcd(16, flat.stride(0))
    codes, scales, fixed, span, most = attached(out, reader)
    block = max(_ACTIVATED, span)
    pieces = -(-width // block)
    # With many programs, those that wait for the previous kernel would take the place of working ones.
    linked = gpu.linked(x.device, rows * pieces <= 8 * gpu.multiprocessors(x.device))
    _activation.apply[(rows, pieces)](
        flat, *factors, out, codes, scales, fixed, flat.stride(0) // align, rows, width=width, block=block, align=align,
        kind=kind, gated=gated, span=span, most=most, num_warps=min(16, 4 * block // _ACTIVATED), **linked)
    return out


@register("gated", "triton", rank=10, supports=gpu.supports)
def gated(x: torch.Tensor, kind: str, reader: Weight | None = None) -> torch.Tensor:
    """`reader`: the matrix that the result [rows, k] is multiplied with."""
    return _activated(x, kind, True, reader)


def scaled(x: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, dtype: torch.dtype, kind: str | None,
           reader: Weight | None) -> torch.Tensor:
    """x [R, C] times factors of its rows [R] and columns [C], in `dtype`; with a kind then `gated`."""
    return _activated(x, kind, kind is not None, reader if kind else None, (rows, columns), dtype)


@register("activation", "triton", rank=10, supports=gpu.supports)
def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    return _activated(x, kind, False)


_NUMBERS = {64: 2048, 128: 2048, 256: 1024}
"""Elements per program by padded head size: the fastest at one token and at 8192 (bench/gpu_rows.py)."""
_EARLY = True
"""Read positions, slots and tables before waiting for the previous kernel. They were written before the embedding's kernel,
which is launched without programmatic dependent launch and so starts only when everything before it has ended."""


@register("rope_write", "triton", rank=10, supports=gpu.supports)
def rope_write(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, positions: torch.Tensor, slots: torch.Tensor | None,
               k_cache: torch.Tensor, v_cache: torch.Tensor | None, cos: torch.Tensor | None = None,
               sin: torch.Tensor | None = None, q_norm: torch.Tensor | None = None, k_norm: torch.Tensor | None = None,
               eps: float = 1e-6, offset: float = 0.0, interleaved: bool = False) -> torch.Tensor:
    tokens, heads, size = q.shape
    kv_heads = k.shape[1]
    out = torch.empty(tokens, heads, size, dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    half = 0 if cos is None else cos.shape[1]
    whole = gpu.covering(size)
    many = max(1, min(gpu.covering(heads), _NUMBERS.get(whole, 1024) // whole))
    warps = min(8, max(1, many * whole // 512))
    kernels.rope_write[(tokens, -(-heads // many) - (-kv_heads // many))](
        q, k, v, positions, slots, k_cache, v_cache, cos, sin, q_norm, k_norm, out, float(eps), float(offset),
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), *((0, 0) if v is None else v.stride()[:2]),
        *k_cache.stride()[:3], *((0, 0, 0) if v_cache is None else v_cache.stride()[:3]), heads=heads,
        kv_heads=kv_heads, size=size, page=k_cache.shape[2], half=half, near=gpu.covering(half),
        far=gpu.covering(size - 2 * half), whole=whole, many=many, early=_EARLY, interleaved=interleaved, num_warps=warps,
        **gpu.linked(q.device))
    return out


@register("latent_write", "triton", rank=10, supports=gpu.supports)
def latent_write(q: torch.Tensor, latent: torch.Tensor, norm: torch.Tensor, eps: float, positions: torch.Tensor,
                 slots: torch.Tensor, cache: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool,
                 out: torch.Tensor) -> None:
    tokens, heads, size = q.shape
    half, width = cos.shape[1], norm.shape[0]
    if tokens == 0:
        return
    many = min(16, gpu.covering(heads))
    kernels.latent_write[(tokens, 1 - (-heads // many))](
        q, latent, norm, positions, slots, cache, cos, sin, out, float(eps), q.stride(0), q.stride(1), latent.stride(0),
        cache.stride(0), cache.stride(2), out.stride(0), out.stride(1), heads=heads, start=size - 2 * half, width=width,
        half=half, page=cache.shape[2], interleaved=interleaved, many=many, near=gpu.covering(half), wide=gpu.covering(width),
        num_warps=4, **gpu.linked(q.device))


_TALL = 32
"""The most tokens whose products with a matrix a head are this project's: their time is that of the launch."""


@register("head_linear", "library", rank=10, supports=gpu.supports, batch_invariant=False)
class LibraryHeadLinear(HeadLinearOps):
    """A vendor library's batched GEMM, which reads and writes strided tensors; for few tokens a kernel whose weights are loaded
    before the previous kernel has ended."""

    @staticmethod
    def apply(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        if len(x) <= _TALL and x.dtype != torch.float32:
            _head_linear(x, weight, out, 16 if len(x) <= 16 else 32, 64 if weight.shape[2] > 256 else 16, 128)
        else:
            torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))


@register("head_linear", "triton-invariant", rank=5, supports=gpu.supports)
class InvariantHeadLinear(HeadLinearOps):
    """Tiles of one size whatever the number of tokens, so that a row's bits depend on the row alone."""

    @staticmethod
    def apply(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        _head_linear(x, weight, out, 16, 64, 64)


def _head_linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, tall: int, wide: int, deep: int) -> None:
    tokens, heads, k = x.shape
    n = weight.shape[2]
    if tokens == 0:
        return
    kernels.head_linear[(-(-tokens // tall), heads, -(-n // wide))](
        x, weight, out, tokens, x.stride(0), x.stride(1), weight.stride(0), weight.stride(1), weight.stride(2),
        out.stride(0), out.stride(1), n=n, k=k, block_m=tall, block_n=wide, block_k=deep, ahead=min(k // deep, 4),
        num_warps=4, **gpu.linked(x.device))


@register("route", "triton", rank=10, supports=gpu.supports)
def route(logits: torch.Tensor, correction: torch.Tensor | None, routing_: Routing, counts: torch.Tensor | None = None,
          live: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    block = gpu.covering(routing_.experts)
    uneven = routing_.groups > 1 and (block != routing_.experts or gpu.covering(routing_.groups) != routing_.groups
                                      or block < 2 * routing_.groups)
    if routing_.score == "sparsemixer" or uneven:
        return routing.route(logits, correction, routing_, counts, live)
    tokens, count, width = len(logits), routing_.picks, routing_.picks + routing_.shared
    picks = torch.empty(tokens, width, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, width, dtype=torch.float32, device=logits.device)
    if tokens == 0:
        return picks, weights
    linked = gpu.linked(logits.device, tokens <= 8 * gpu.multiprocessors(logits.device))
    kernels.route[(tokens,)](
        logits.contiguous(), correction, picks, weights, counts, live, experts=routing_.experts, block=block, count=count,
        slots=gpu.covering(width), shared=routing_.shared, score=routing_.score, normalise=routing_.normalise,
        scale=routing_.scale, least=routing_.least, groups=routing_.groups, picked=routing_.picked_groups,
        two=routing_.group_score == "two", num_warps=1, **linked)
    return picks, weights


_STEPPED = 128
"""Tokens a program."""
_WORDS = 512
"""Words of the step's array a program."""
_PIECES = 4
"""The most programs that share a row of a block table."""


@register("bring", "triton", rank=10, supports=gpu.supports)
def bring(host: torch.Tensor, there: torch.Tensor) -> None:
    """By a kernel that reads the host's memory: behind a graph, the call of a copy returns only when the graph has nearly run,
    so that the next graph comes late; and copies queue behind the loads of pages."""
    kernels.bring[(-(-len(there) // _WORDS),)](host, there, len(there), block=_WORDS, num_warps=4)


@register("build_step", "triton", rank=10, supports=gpu.supports)
def build_step(known: torch.Tensor, tables: list[torch.Tensor], row: torch.Tensor, start: torch.Tensor,
               query_start: torch.Tensor, page: int, tokens: int, columns: int) -> StepTensors:
    """For all cache groups in one launch. Block table entries beyond a segment's context are left uninitialised."""
    device, segments = known.device, len(row)
    # Each output begins at a multiple of 64 bytes, whatever the step: alignment is part of what kernels are compiled for.
    flat, cut_row = -(-tokens // 16) * 16, -(-columns // 16) * 16
    ids = torch.empty(2, flat, dtype=torch.int32, device=device)
    slots = torch.empty(len(tables), flat, dtype=torch.int64, device=device)
    cut = torch.empty(len(tables), segments, cut_row, dtype=torch.int32, device=device)
    stride = tables[0].stride(0)
    assert all(table.stride() == (stride, 1) for table in tables), "tables of one shape, rows contiguous"
    # By the longest possible context, not this step's: otherwise every length would compile its own kernel.
    wide = max(128, gpu.covering(-(-tables[0].shape[1] // _PIECES)))
    pieces = -(-columns // wide)
    kernels.build_step[(-(-tokens // _STEPPED) + segments * pieces,)](
        known, row, start, query_start, tuple(tables), ids[0], ids[1], tuple(cut.unbind()), tuple(slots.unbind()),
        segments, tokens, columns, segments.bit_length(), pieces, known.stride(0), stride, cut_row, page=page, block=_STEPPED,
        wide=wide, num_warps=4, **gpu.linked(device))
    groups = [GroupStep(table[:, :columns], places[:tokens]) for table, places in zip(cut, slots, strict=True)]
    return StepTensors(ids[0, :tokens], ids[1, :tokens], groups)


_MOVED = 512
"""Items, lines or segments that are moved at a time."""
_ITEM = {"fields": FIELDS, "place": int(WorkItem.POSITION), "whose": int(WorkItem.SEGMENT), "queries": int(WorkItem.QUERIES),
         "listed": int(WorkItem.LISTED)}


@register("move_step", "triton", rank=10, supports=gpu.supports)
def move_step(of: Moving, work: Sequence[torch.Tensor], length: torch.Tensor | None) -> None:
    """One program does it all, because it changes what it reads."""
    lists = work or [of.row[:0]]
    for items in lists:
        kernels.move_step[(1,)](items, *of, length, len(items), len(of.line_row), len(of.row), first=length is not None,
                                last=items is lists[-1], block=_MOVED, num_warps=4, **gpu.linked(of.row.device), **_ITEM)
