"""Mixtures of experts on NVIDIA GPUs: grouped GEMMs over picks that are sorted on the device.

No tensor is read on the host and all sizes follow from the number of tokens, so a CUDA graph can hold every launch. `choose`
alone decides which kernel and tile serve; its constants come from the measurements of bench/gpu_experts.py. The kernels are in
ops/experts_kernels.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from penstock.ops import experts_coded, gpu
from penstock.ops.coded_forms import FP8, MOST, NAMES
from penstock.ops.coded_triton import quantized
from penstock.ops.experts import ExpertsOps, Glu, Stack
from penstock.ops.experts_hosted import HostedStack
from penstock.ops.linear import Weight
from penstock.ops.linear_triton import Tile
from penstock.ops.table import register

kernels = gpu.Kernels("experts_kernels")


class Plan(NamedTuple):
    """The tiles of both products, whose rows are picks of one expert, and whether those are sorted first, with one `tall`."""

    up: Tile
    down: Tile
    sort: bool
    high: int = 0
    """Rows of the tiles of experts with more picks than two of `tall` hold, where picks are sorted: routers may favour a few
    experts. 0: as the others."""


_ONE_BY_ONE = 4
"""The most tokens of which each reads its experts for itself: few experts are shared, and L2 has them."""
_FEW = 64
"""The most picks that are not sorted first: each program finds its expert's own."""
_UNSORTED = 512
"""The same of products alone, which nothing sorts."""
_ARRANGED = 4096
"""The most picks that one launch sorts."""


_SHORT = Tile(128, 128, 64, warps=4, stages=3, boxed=True, group=8)
"""For sums over few columns: of two programs on a multiprocessor one multiplies while the other stores."""


def choose(tokens: int, picks: int, experts: int, invariant: bool = False, boxes: bool = True, short: bool = False) -> Plan:
    """The kernels for `tokens` tokens with `picks` of `experts` each. `boxes`: whether TMA may be used; `short`: whether the
    experts' inner size is at most 1,024."""
    if tokens <= _ONE_BY_ONE and not invariant:
        up = Tile(1, 2, 1024, warps=2) if tokens == 1 else Tile(1, 8, 256, warps=2, stages=3)
        return Plan(up, Tile(1, 16, 128, warps=1, stages=3, ahead=4), False)
    total = tokens * picks
    each = total / experts
    if total <= _FEW or each <= 12:
        tile = Tile(16, 64, 128, stages=3, swap=True)
        return Plan(tile, tile, total > _FEW, 64)
    if each <= 20:
        return Plan(Tile(32, 64, 64, swap=True), Tile(32, 64, 128, stages=3, swap=True), True, 128)
    if each <= 80:
        return Plan(Tile(64, 64, 64), Tile(64, 128, 64), True, 128)
    tile = Tile(128, 128, 64, warps=8, stages=3, boxed=boxes, group=8)
    if not boxes:
        return Plan(tile, tile, True)
    if each <= 200:
        return Plan(tile, tile._replace(boxed=False), True)
    return Plan(tile, _SHORT if short else tile._replace(wide=256), True)


def choose_coded(tokens: int, picks: int, up: Stack, down: Stack, invariant: bool = False, boxes: bool = False) -> Plan:
    """As `choose` for quantized experts: the weight, if it is decoded in registers, is always the operand of 64 rows."""
    def tile(tall: int, wide: int, warps: int = 4) -> Tile:
        return Tile(tall, wide, 128, warps=warps, stages=4 if tall <= 32 else 3, swap=True)

    coded = [stack.coded for stack in (up, down) if stack.coded is not None]
    four, total = all(one.four for one in coded), tokens * picks
    each = total / up.count
    alone = all(one.kind in ("int4", "e2m1", "plain") for one in coded) and not invariant
    if alone and tokens <= (_ONE_BY_ONE if four else 1):
        one = Tile(1, 32, 256, stages=3) if four else Tile(1, 8, 128, warps=1, stages=6)
        return Plan(Tile(1, 4, 256, warps=1, ahead=1) if _by_rows(up) else one,
                    Tile(1, 8, 256, warps=1, stages=3, ahead=3) if _by_rows(down) else one, False)
    if total <= _FEW:
        return Plan(tile(16, 64), tile(16, 64), False)
    boxed = boxes and not invariant and _by_rows(up) and _by_rows(down)
    for most, tall in ((12, 16), (26, 32), (64, 64), (200, 128)) if boxed else ((4, 16), (20, 32), (80, 64)):
        if each <= most:
            short = _SHORT._replace(tall=tall, deep=128) if boxed and tall >= 64 else tile(tall, 64)
            return Plan(tile(tall, 64), short, True, 64 if boxed and tall <= 32 else 0)
    if boxed:
        return Plan(_SHORT._replace(deep=128, warps=8), _SHORT._replace(deep=128), True)
    # With scales of groups, sums of a group are kept beside the two of gate and up.
    lean = up.coded is not None and up.coded.form != "row"
    return Plan(tile(128, 64 if lean else 128, warps=8), tile(128, 128, warps=8), True)


def _by_rows(stack: Stack) -> bool:
    """Whether a stack is of FP8 codes, of which rows alone have scales, as those of x have: TMA can read them, and `picked`."""
    coded = stack.coded
    return coded is not None and (coded.data.dtype, coded.kind, coded.form, coded.scaled, coded.padded) == (
        FP8, "plain", "row", "token", stack.k)


class Sorted(NamedTuple):
    order: torch.Tensor
    starts: torch.Tensor
    tile_expert: torch.Tensor
    tile_place: torch.Tensor
    high: int


def _sort(picks: torch.Tensor, experts: int, tall: int, high: int = 0) -> Sorted:
    """The picks by expert, and the tiles of `tall` or `high` of them."""
    total, slots = picks.numel(), max(16, gpu.covering(experts))
    count = total // tall + min(experts, total)
    sizes = (total, experts + 2, count, count)
    order, starts, tile_expert, tile_place = picks.new_empty(sum(sizes)).split(sizes)
    found = Sorted(order, starts, tile_expert, tile_place, high)
    if total <= _ARRANGED:
        block = gpu.covering(max(total, 128))
        kernels.arrange[(experts,)](picks, *found[:4], total, count, experts=experts, slots=slots, block=block, tall=tall,
                                    high=high, num_warps=4 if block <= 1024 else 8, **gpu.linked(picks.device))
        return found
    counts = picks.new_zeros(slots)
    cursor, block = torch.empty_like(counts), 1024
    programs = (-(-total // block),)
    kernels.tally[programs](picks, counts, total, slots=slots, block=block)
    kernels.plan[(experts,)](counts, cursor, *found[1:4], count, experts=experts, slots=slots, tall=tall, high=high)
    kernels.place[programs](picks, cursor, order, total, block=block)
    return found


def _product(tile: Tile, x: torch.Tensor, stack: Stack, bias: torch.Tensor | None, picks: torch.Tensor, scales: torch.Tensor,
             found: Sorted | None, out: torch.Tensor, glu: Glu | None, inward: bool, beyond: Weight | None = None) -> None:
    """Launches one grouped GEMM: gated with a `glu`, weighted without. `beyond`: the matrix of the last experts."""
    coded = stack.coded
    if coded is not None and not tile.boxed and (not tile.ahead or (inward and glu is not None)):
        experts_coded.product(tile, x, stack, bias, picks, scales, found, out, glu, inward)
        return
    total, count = picks.numel(), picks.shape[1]
    gated, k, experts = glu is not None, stack.k, stack.count
    n = stack.n // 2 if gated else stack.n
    kind = glu or Glu()
    shared: dict[str, Any] = {
        "count": count, "deep": tile.deep, "wide": tile.wide, "gated": gated, "kind": kind.kind, "alpha": kind.alpha,
        "limit": kind.limit, "shift": kind.shift, "inward": inward, "num_warps": tile.warps}
    columns, even = -(-n // tile.wide), k % tile.deep == 0
    where = stack.where if isinstance(stack, HostedStack) else None
    runs = 0 if beyond is None else beyond.n // stack.n if gated else beyond.k // k
    last = None if beyond is None else beyond.data
    if tile.boxed:
        assert found is not None
        from triton.tools.tensor_descriptor import TensorDescriptor

        parts, xs, gains = 2 if gated else 1, None, None
        if coded is not None:
            (x, xs), gains = quantized(x, coded), coded.gains
        box = TensorDescriptor.from_tensor(stack.data.view(experts * parts, n, k), [parts, tile.wide, tile.deep])
        rows = x if gated else TensorDescriptor.from_tensor(x, [tile.tall, tile.deep])
        programs = min(len(found.tile_expert) * columns, gpu.multiprocessors(x.device) * 8 // tile.warps)
        del shared["inward"]
        kernels.panels[(programs,)](rows, box, xs, gains, bias, out, *found[:4], scales, n, k, x.stride(0), experts=experts,
                                    tall=tile.tall, group=tile.group, even=even, num_stages=tile.stages, **shared)
        return
    block = (tile.tall + tile.wide * (2 if gated else 1)) * tile.deep * x.element_size()
    shared |= {"even": even, "experts": experts, "runs": runs, **gpu.linked(x.device, total <= 4096),
               "num_stages": max(1, min(tile.stages, gpu.shared_bytes(x.device) // block))}
    if tile.tall == 1:
        ahead = min(tile.ahead, k // tile.deep) if not gated else 0
        gains, fixed, most = (None, None, 0.0) if coded is None else (coded.gains, coded.input_scale, MOST[FP8])
        if coded is not None and gated:
            (x, fixed), most = quantized(x, coded), 0.0
        kernels.picked[(columns, total)](x, stack.data, where, last, gains, fixed, bias, out, picks, scales, n, k, x.stride(0),
                                         ahead=ahead, stages=shared["num_stages"], most=most, whole=gpu.covering(k),
                                         paired=coded is not None and x.device.type != "cpu", **shared)
        return
    kernels.grouped[(columns, experts + runs if found is None else len(found.tile_expert))](
        x, stack.data, where, last, bias, out, picks, *(found[:4] if found else (picks,) * 4), scales, total, n, k, x.stride(0),
        arranged=found is not None, block=gpu.covering(max(total, 16)) if found is None else 16, tall=tile.tall,
        swap=tile.swap, stages=shared["num_stages"], high=found.high if found else 0, **shared)


def launch(plan: Plan, x: torch.Tensor, picks: torch.Tensor, weights: torch.Tensor, up: Stack, down: Stack, glu: Glu,
           up_bias: torch.Tensor | None = None, down_bias: torch.Tensor | None = None, inward: bool = False,
           shared: tuple[Weight, Weight] | None = None, whole: bool = True) -> torch.Tensor:
    """The operation by a plan's kernels."""
    tokens, count = picks.shape
    width, total = x.shape[1], picks.numel()
    if tokens == 0:
        return torch.empty_like(x)
    beyond, beyond_down = shared or (None, None)
    experts = up.count + (0 if beyond is None else beyond.n // up.n)
    found = _sort(picks, experts, plan.up.tall, plan.high) if plan.sort else None
    inner = torch.empty(total, down.k, dtype=x.dtype, device=x.device)
    results = torch.empty(total, width, dtype=x.dtype, device=x.device)
    _product(plan.up, x, up, up_bias, picks, weights, found, inner, glu, inward, beyond)
    _product(plan.down, inner, down, down_bias, picks, weights, found, results, None, inward, beyond_down)
    if not whole:
        return results.view(tokens, count, width)
    out, block = torch.empty_like(x, memory_format=torch.contiguous_format), min(1024, gpu.covering(width))
    kernels.add_up[(tokens, -(-width // block))](results, picks, out, width=width, count=count, block=block, num_warps=4,
                                                 **gpu.linked(x.device, total <= 4096))
    return out


class TritonExperts(ExpertsOps):
    """The order of a product's summation may depend on the number of tokens."""

    def products(self, x: torch.Tensor, picks: torch.Tensor, stack: Stack, bias: torch.Tensor | None) -> torch.Tensor:
        tile = Tile(16, 64, 128, stages=2, swap=True) if stack.coded is None else choose_coded(1, 16, stack, stack, True).down
        out = torch.empty(len(x), stack.n, dtype=x.dtype, device=x.device)
        for first in range(0, len(x), _UNSORTED):
            some = slice(first, first + _UNSORTED)
            chosen = picks[some, None].contiguous()
            _product(_exact(tile) if x.dtype == torch.float32 else tile, x[some], stack, bias, chosen,
                     torch.ones(chosen.shape, device=x.device), None, out[some], None, False)
        return out

    def pack_stored(self, scheme: Any, parts: Mapping[str, torch.Tensor], count: int, shape: tuple[int, int],
                    dtype: torch.dtype, slots: int = 0, device: torch.device | None = None) -> Stack:
        if scheme.name == "plain" and device is not None:
            return HostedStack(parts["weight"].view(count, *shape), slots, device, self)
        return experts_coded.pack(scheme, parts, count, shape, dtype, self, slots, device)

    def leaves_parts(self, tokens: int, up: Stack) -> bool:
        # Behind one row's short programs, two launches take less than one, as each begins while the one before runs.
        return tokens > 1 or up.coded is None

    def joins(self, tokens: int, picks: int, up: Stack, down: Stack, shared: tuple[Weight, Weight]) -> bool:
        """Of plain matrices, and while the kernels need no descriptor of a tensor."""
        plain = (type(one) is Weight for one in shared), (type(one) is Stack for one in (up, down))
        return (all(map(all, plain)) and not self.invariant and up.dtype != torch.float32
                and not choose(tokens, picks, up.count).up.boxed)

    def apply(self, x: torch.Tensor, picks: torch.Tensor, weights: torch.Tensor, up: Stack, down: Stack, glu: Glu,
              up_bias: torch.Tensor | None = None, down_bias: torch.Tensor | None = None, inward: bool = False,
              shared: tuple[Weight, Weight] | None = None, whole: bool = True) -> torch.Tensor:
        boxes = (gpu.capability(x.device) >= (9, 0) and x.dtype != torch.float32 and not inward
                 and up.k % 8 == 0 and down.k % 8 == 0 and not isinstance(up, HostedStack))
        if up.coded is not None or down.coded is not None:
            plan = choose_coded(len(x), picks.shape[1], up, down, self.invariant, boxes)
        else:
            own = picks.shape[1] - (0 if shared is None else shared[0].n // up.n)
            plan = choose(len(x), own, up.count, self.invariant, boxes, down.k <= 1024)
        if x.dtype == torch.float32:
            plan = plan._replace(up=_exact(plan.up), down=_exact(plan.down), high=0)
        if self.invariant:  # which tiles a token is in must not depend on others' picks
            plan = plan._replace(high=0)
        return launch(plan, x, picks, weights, up, down, glu, up_bias, down_bias, inward, shared, whole)


def _exact(tile: Tile) -> Tile:
    """The tile for float32, which has no exact tensor core instruction: small, so that it fits registers."""
    return tile if tile.tall == 1 else Tile(min(tile.tall, 32), 32, 32, stages=2)


class InvariantExperts(TritonExperts):
    """Every tile sums k in order in one float32 accumulator with the tensor core instruction of 64 weight or pick rows, so that
    a token's bits do not depend on the tile (as in ops/linear_invariant.py)."""

    invariant = True


for _op in ("experts", *(f"experts.{_name}" for _name in NAMES)):
    register(_op, "triton", rank=10, supports=gpu.supports, batch_invariant=False)(TritonExperts())
    register(_op, "triton-invariant", rank=5, supports=gpu.supports)(InvariantExperts())
