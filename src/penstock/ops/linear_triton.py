"""GEMMs on NVIDIA GPUs: Triton kernels for few rows, cuBLAS for many.

With few rows a GEMM is bound by the memory bandwidth of reading the weight: each element is read once, with enough loads in
flight to saturate memory. `choose` alone decides which kernel and tile serve a shape; its constants come from the measurements
of bench/gpu_linear.py. The kernels are in ops/linear_kernels.py, batch-invariant GEMMs in ops/linear_invariant.py."""

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from penstock.ops import gpu, rows_triton
from penstock.ops.linear import Weight
from penstock.ops.table import register

kernels = gpu.Kernels("linear_kernels")


class Tile(NamedTuple):
    """The tile sizes of a GEMM: a program computes `tall` x `wide` outputs over K in blocks of `deep`, in `stages` stages."""

    tall: int
    """Rows of x per program (BLOCK_M); 1 selects the matrix-vector kernel."""
    wide: int
    """Rows of the weight per program, which are columns of the output (BLOCK_N)."""
    deep: int
    split: int = 1
    """Split-K: parts of K that are summed separately, each by its own program unless `joined`."""
    warps: int = 4
    stages: int = 4
    swap: bool = False
    """Compute the transposed tile: the weight is the tensor core's operand of 64 rows, x the narrow one."""
    ahead: int = 0
    """Blocks of the weight that a program prefetches before it waits for the previous kernel (programmatic dependent launch).
    With more than one row, only kernels that prefetch let the next one start early: a long kernel needs all resources
    itself."""
    group: int = 1
    """Swizzle: tiles of this many rows of tiles are scheduled together, for L2 reuse."""
    joined: bool = False
    """One program computes all parts of K in turn, and adds them in the same order as split programs do."""
    boxed: bool = False
    """Persistent programs, whose blocks are moved by TMA (`boxable`)."""


def choose(rows: int, n: int, k: int, gated: bool, boxes: bool = False) -> Tile | None:
    """The tile for x [rows, k] times [n, k] transposed (gated: of each half of [2 n, k]); None selects cuBLAS.

    `boxes`: whether TMA may be used."""
    if rows == 1:
        return one_row(n, k)
    if rows <= 64:
        return few_rows(rows, n, k, gated, divide=True)
    if rows <= 128:
        return Tile(128, 128, 64, warps=8, group=8) if gated and n >= 8192 else None
    return BOXED_GATED if gated and boxes and rows > 512 and _fills(BOXED_GATED, rows, n) else None


def _fills(tile: Tile, rows: int, n: int) -> bool:
    """Whether the last wave of tiles occupies nearly all multiprocessors (persistent programs take one tile after another)."""
    tiles = -(-rows // tile.tall) * -(-n // tile.wide)
    return tiles >= 0.93 * gpu.MULTIPROCESSORS * -(-tiles // gpu.MULTIPROCESSORS)


BOXED = Tile(128, 256, 64, warps=8, stages=3, group=8, boxed=True)
BOXED_GATED = BOXED._replace(wide=128)
"""For many rows. In both, one tensor core operand is 256 rows of the weight."""


def one_row(n: int, k: int) -> Tile:
    """GEMV without tensor cores. Where K is short, a program prefetches all of its weights before it waits."""
    if k > 1024:
        return Tile(1, 4, 1024, ahead=1 if 4096 <= k <= 8192 else 3)
    return Tile(1, 4, 256, warps=1, stages=6, ahead=4) if n < 16384 else Tile(1, 16, 256)


def parts(n: int, k: int, gated: bool) -> int:
    """The number of split-K parts: more than one where few output columns make too few programs."""
    split = 1
    while -(-n // 64) * split * (2 if gated else 1) < 64 and k // split >= 512:
        split *= 2
    return split


def few_rows(rows: int, n: int, k: int, gated: bool, divide: bool) -> Tile:
    """The tile for up to 64 rows. `divide`: split-K may be used.

    The fewer programs there are, the more loads each needs in flight. Above 32 rows x is read as often as the weight if a
    program takes 64 of its rows, so tiles are wide where that leaves enough of them, and narrow rather than split elsewhere."""
    if rows > 32 and n >= 8192:
        return Tile(64, 128, 64)
    if rows > 32 and 2048 <= n < 6144:
        return Tile(64, 32, 128, stages=8 if k >= 4096 else 5, ahead=3)
    programs = -(-n // 64)
    if programs < 32 and (rows > 32 or not divide):
        return Tile(64, 16, 128, 2 if divide else 1, stages=4 if divide else 8, ahead=3)
    split = parts(n, k, gated) if divide else 1
    programs *= split
    stages = 8 if programs <= 64 and k >= 4096 else 6 if programs <= gpu.MULTIPROCESSORS else 4
    return Tile(16 if rows <= 16 else 32 if rows <= 32 else 64, 64, 128, split, stages=stages, swap=True,
                ahead=3 if programs <= 64 else 0)


@cache
def tickets_of(device: torch.device) -> torch.Tensor:
    """Counters of split-K programs per tile, which leave them at zero. Assumes one stream per device."""
    return torch.zeros(4096, dtype=torch.int32, device=device)


def parts_of(tile: Tile, count: int, out: torch.Tensor, gated: bool,
             sums: torch.dtype = torch.float32) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Of split-K with `count` tiles: programs of a tile, and buffers of partial sums and tickets (`out` if there are none)."""
    if tile.joined or tile.split == 1:
        return 1, out, out
    tickets = tickets_of(out.device)
    assert count <= len(tickets), (tile, count)
    size = count * tile.split * (2 if gated else 1) * tile.tall * tile.wide
    return tile.split, torch.empty(size, dtype=sums, device=out.device), tickets


def aligned(x: torch.Tensor, weight: Weight) -> bool:
    """Whether all rows start at multiples of 16 bytes, which vectorised loads need."""
    return weight.k % 16 == 0 and x.data_ptr() % 16 == 0 and (x.shape[0] == 1 or x.stride(0) % 16 == 0)


def boxable(x: torch.Tensor, weight: Weight, n: int) -> bool:
    """Whether TMA can move the blocks: Hopper or later, and rows of all three matrices at multiples of 16 bytes."""
    return gpu.capability(x.device) >= (9, 0) and n % 8 == 0 and aligned(x, weight)


def _stages(tile: Tile, row: int, device: torch.device, gated: bool) -> int:
    """The tile's pipeline stages, or as many as fit into shared memory with rows of `row` bytes."""
    return max(1, min(tile.stages, gpu.shared_bytes(device) // ((tile.tall + tile.wide * (2 if gated else 1)) * row)))


def launch(tile: Tile, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, dtype: torch.dtype,
           kind: str | None = None, late: bool = False, helpers: int = 0, **adapters: Any) -> torch.Tensor:
    """The GEMM by Triton, plus bias, in `dtype`; with a kind, gated in the epilogue. Fast if `aligned`. `late`: as in
    ops/linear_kernels.py::tiles; `helpers` programs, and arguments of theirs, as in `matvec`."""
    rows, k, n = x.shape[0], weight.k, weight.n if kind is None else weight.n // 2
    out = torch.empty(rows, n, dtype=dtype, device=x.device)
    if rows == 0:
        return out
    if tile.boxed:
        return _launch_boxed(tile, x, weight, bias, out, kind)
    align = 16 if aligned(x, weight) else 1
    columns = -(-n // tile.wide)
    stages = _stages(tile, tile.deep * x.element_size(), x.device, kind is not None)
    shared = {"wide": tile.wide, "deep": tile.deep, "even": k % tile.deep == 0, "kind": kind,
              "num_warps": tile.warps, "num_stages": stages, **gpu.linked(x.device)}
    if tile.tall == 1:
        ahead = min(tile.ahead, k // tile.deep)
        kernels.matvec[(helpers + columns,)](x, weight.data, None, None, bias, out, n, k, stages=stages, ahead=ahead, most=0.0,
                                             whole=1, **shared, **adapters)
        return out
    count = columns * -(-rows // tile.tall)
    programs, partial, tickets = parts_of(tile, count, out, kind is not None)
    kernels.tiles[(count, programs)](
        x, weight.data, bias, out, partial, tickets, rows, n, k, x.stride(0) // align, tall=tile.tall, split=tile.split,
        joined=tile.joined, swap=tile.swap, ahead=tile.ahead if align > 1 else 0, align=align,
        group=tile.group, threads=32 * tile.warps, late=late, **shared)
    return out


def _launch_boxed(tile: Tile, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, out: torch.Tensor,
                  kind: str | None) -> torch.Tensor:
    from triton.tools.tensor_descriptor import TensorDescriptor

    (rows, n), k, data = out.shape, weight.k, weight.data
    boxes = [TensorDescriptor.from_tensor(tensor, block) for tensor, block in (
        (x, [tile.tall, tile.deep]),
        (data, [tile.wide, tile.deep]) if kind is None else (data.view(2, n, k), [2, tile.wide, tile.deep]),
        (out, [tile.tall, tile.wide // 2 if kind is None else tile.wide]))]
    count = -(-rows // tile.tall) * -(-n // tile.wide)
    kernels.panels[(min(count, gpu.multiprocessors(x.device)),)](
        boxes[0], boxes[1], bias, boxes[2], rows, n, k, tall=tile.tall, wide=tile.wide, deep=tile.deep, group=tile.group,
        split=tile.split, kind=kind, num_warps=tile.warps, num_stages=tile.stages)
    return out


def library(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The GEMM by cuBLAS. A wider `dtype` is written from the float32 accumulators, not from rounded results."""
    if x.is_meta:  # a rehearsal: for its shapes torch would import sympy, which takes a second or two
        return torch.empty(x.shape[0], weight.n, dtype=dtype, device=x.device)
    if dtype == x.dtype:
        return F.linear(x, weight.data, bias)
    out = torch.mm(x, weight.data.T, out_dtype=dtype) if x.is_cuda else x.to(dtype) @ weight.data.T.to(dtype)
    return out if bias is None else out + bias


@register("linear", "triton", rank=10, supports=gpu.supports, batch_invariant=False)
class TritonLinear:
    """LinearOps (ops/linear.py). The order of summation may depend on the number of rows."""

    @staticmethod
    def pack(weight: torch.Tensor) -> Weight:
        if weight.is_cuda:
            tickets_of(weight.device)  # before any graph is captured
        return Weight(weight.contiguous(), weight.shape[0], weight.shape[1], weight.dtype)

    @staticmethod
    def apply(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None,
              out_dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = x.dtype if out_dtype is None else out_dtype
        tile = choose(x.shape[0], weight.n, weight.k, False) if suits(x, weight) else None
        return library(x, weight, bias, dtype) if tile is None else launch(tile, x, weight, bias, dtype)

    @staticmethod
    def gated(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
        n, k = weight.n // 2, weight.k
        tile = choose(x.shape[0], n, k, True, boxable(x, weight, n)) if suits(x, weight) else None
        if tile is None:
            return rows_triton.gated(library(x, weight, bias, x.dtype), kind)
        return launch(tile, x, weight, bias, x.dtype, kind)

    @staticmethod
    def gather(ids: torch.Tensor, weight: Weight) -> torch.Tensor:
        return rows_triton.gather(ids, weight.data)


def suits(x: torch.Tensor, weight: Weight) -> bool:
    """Whether the Triton kernels can serve: at least one row, half precision, aligned."""
    return x.shape[0] > 0 and x.dtype != torch.float32 and aligned(x, weight)
