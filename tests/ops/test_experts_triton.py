"""Triton's mixtures of experts against float64: every kernel, odd sizes; interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from penstock.ops.experts import Glu
from penstock.ops.experts_triton import InvariantExperts, Plan, Tile, TritonExperts, _sort, choose, launch
from penstock.ops.linear_triton import TritonLinear
from penstock.ops.routing import Routing
from penstock.ops.rows_triton import add_rms_norm, route
from penstock.quant.fp8 import FP8
from penstock.quant.scheme import Scheme
from tests.ops.interpreter import DEVICE, DTYPES
from tests.ops.kernels import close, random
from tests.ops.test_experts import GLUS, Case, inputs, plain
from tests.ops.test_routing import EXPERTS, KINDS, reference

OPS = TritonExperts()
PLANS = {
    "one by one": Plan(Tile(1, 8, 64, stages=2), Tile(1, 4, 16, stages=2, ahead=1), False),
    "unsorted": Plan(Tile(16, 32, 32, stages=2, swap=True), Tile(16, 16, 64, stages=2), False),
    "sorted": Plan(Tile(16, 32, 32, stages=2, swap=True), Tile(16, 64, 32, stages=2), True),
    "tall": Plan(Tile(64, 32, 64, stages=2), Tile(64, 32, 32, stages=2), True),
    "of two heights": Plan(Tile(16, 32, 128, stages=2, swap=True), Tile(16, 64, 32, stages=2), True, high=64),
}
BOXED = Plan(Tile(64, 32, 32, stages=2, boxed=True, group=2), Tile(64, 64, 32, stages=2, boxed=True, group=4), True)
SIZES = [Case(3, 7, 3, 64, 48), Case(23, 5, 2, 72, 40), Case(40, 9, 1, 96, 64)]


def found(plan: Plan, case: Case, dtype: torch.dtype, biased: bool = False, glu: Glu = GLUS["swiglu"],
          inward: bool = False, nobody: bool = False) -> None:
    held = inputs(case, dtype, biased)
    if nobody:
        held["picks"][::2, 0] = -1  # type: ignore[index]
    there = {name: None if tensor is None else tensor.to(DEVICE) for name, tensor in held.items()}
    up, down = OPS.pack(there.pop("up")), OPS.pack(there.pop("down"))  # type: ignore[arg-type]
    got = launch(plan, up=up, down=down, glu=glu, inward=inward, **there)  # type: ignore[arg-type]
    close(got.cpu(), plain(**held, glu=glu, inward=inward), 1.0, factor=8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_sum(plan: Plan, dtype: torch.dtype) -> None:
    for case in SIZES[:2] if plan.up.tall == 1 else SIZES:
        found(plan, case, dtype)


@pytest.mark.parametrize("plan", [*PLANS.values(), BOXED], ids=[*PLANS, "boxed"])
def test_biases_activations_and_nobody(plan: Plan) -> None:
    for glu in GLUS.values():
        found(plan, SIZES[1], torch.float16, True, glu, nobody=True)
    if not plan.up.boxed:
        found(plan, SIZES[1], torch.float16, True, inward=True)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_network_that_every_token_takes(plan: Plan) -> None:
    """As two experts more, whose channels are runs of those of one matrix."""
    case, glu = Case(40 if plan.high else 5, 3, 2, 72, 40), GLUS["swiglu"]
    held = inputs(case, torch.float16)
    there = {name: tensor.to(DEVICE) for name, tensor in held.items() if tensor is not None}
    up, down = OPS.pack(there.pop("up")), OPS.pack(there.pop("down"))
    wide, narrow = (random(*shape, seed=7).half().to(DEVICE) * 0.1 for shape in ((4 * 40, 72), (72, 2 * 40)))
    shared = TritonLinear.pack(wide), TritonLinear.pack(narrow)
    routing = Routing(3, 2, shared=2)
    picks, weights = route(random(case.tokens, 3, seed=8).to(DEVICE), None, routing)
    got = launch(plan, there["x"], picks, weights, up, down, glu, shared=shared)
    own = {**held, "picks": picks[:, :2].cpu(), "weights": weights[:, :2].cpu()}
    exact = plain(**own, glu=glu) + glu(there["x"].cpu().double() @ wide.cpu().double().T) @ narrow.cpu().double().T
    close(got.cpu(), exact, 1.0, factor=8)


def test_parts_are_left_to_the_norm() -> None:
    """Bit by bit what is summed first and normed then."""
    case, glu = Case(23, 5, 3, 72, 40), GLUS["swiglu"]
    there = {name: tensor.to(DEVICE) for name, tensor in inputs(case, torch.float16).items() if tensor is not None}
    up, down = OPS.pack(there.pop("up")), OPS.pack(there.pop("down"))
    whole = launch(PLANS["sorted"], **there, up=up, down=down, glu=glu)
    parts = launch(PLANS["sorted"], **there, up=up, down=down, glu=glu, whole=False)
    assert parts.shape == (23, 3, 72)
    residual, gain = random(23, 80, seed=4).half().to(DEVICE)[:, :72], random(72, seed=5).half().to(DEVICE)
    wanted = add_rms_norm(whole, residual.clone(), gain, 1e-6, 1.0)
    assert all(map(torch.equal, add_rms_norm(parts, residual.clone(), gain, 1e-6, 1.0), wanted))


def test_networks_that_are_joined() -> None:
    """Plain matrices of any mode but the batch-invariant one, while no kernel needs their descriptors."""
    up, down = (OPS.pack(torch.zeros(16, *shape, dtype=torch.bfloat16, device=DEVICE)) for shape in ((16, 8), (8, 8)))
    shared = tuple(TritonLinear.pack(torch.zeros(*shape, dtype=torch.bfloat16, device=DEVICE)) for shape in ((32, 8), (8, 16)))
    assert [OPS.joins(tokens, 2, up, down, shared) for tokens in (1, 8, 512, 4096)] == [True, True, True, False]
    assert not InvariantExperts().joins(1, 2, up, down, shared)
    assert not OPS.joins(1, 2, OPS.pack(torch.zeros(16, 16, 8, device=DEVICE)), down, shared)


def test_boxed_sum() -> None:
    for dtype in DTYPES[1:]:
        for case in (*SIZES, Case(150, 3, 2, 136, 72)):
            found(BOXED, case, dtype)


@pytest.mark.parametrize("total", [1, 40, 700, 5000])
def test_sorting(total: int) -> None:
    """Both ways of sorting, with picks of nobody and experts without picks."""
    for experts, tall, high in ((5, 16, 0), (60, 64, 0), (1, 16, 0), (5, 16, 64), (60, 16, 128)):
        generator = torch.Generator().manual_seed(total)
        picks = torch.randint(-1, max(1, experts - 2), (total, 1), generator=generator).int().to(DEVICE)
        order, starts, owner, place = (tensor.cpu() for tensor in _sort(picks, experts, tall, high)[:4])
        seen, tiles = picks.flatten().cpu(), list[tuple[int, int]]()
        for expert in range(experts):
            mine = order[starts[expert]:starts[expert + 1]]
            assert sorted(mine.tolist()) == (seen == expert).nonzero().flatten().tolist()
            height = high if high and len(mine) > 2 * tall else tall
            tiles += [(expert, int(starts[expert]) + at) for at in range(0, len(mine), height)]
        assert list(zip(owner.tolist(), place.tolist(), strict=True))[:len(tiles)] == tiles
        assert (owner[len(tiles):] == -1).all() and starts[experts + 1] == len(tiles)


@pytest.mark.parametrize("routing", KINDS.values(), ids=KINDS)
def test_routing(routing: Routing) -> None:
    logits = random(50, routing.experts, seed=1) * 2
    correction = random(routing.experts, seed=2) * 0.2 if routing.corrected else None
    picks, weights = route(logits.to(DEVICE), None if correction is None else correction.to(DEVICE), routing)
    wanted, scaled = reference(logits, correction, routing)
    assert torch.equal(picks.cpu(), wanted)
    torch.testing.assert_close(weights.cpu(), scaled, atol=1e-6, rtol=1e-5)


def test_even_groups_and_ties() -> None:
    """As DeepSeek V3 has them, by the kernel; of equal scores the lowest index is picked."""
    routing = Routing(32, 4, "sigmoid", True, 2.5, True, 8, 3)
    logits, correction = random(30, 32, seed=1), random(32, seed=2) * 0.2
    picks, weights = route(logits.to(DEVICE), correction.to(DEVICE), routing)
    wanted, scaled = reference(logits, correction, routing)
    assert torch.equal(picks.cpu(), wanted)
    torch.testing.assert_close(weights.cpu(), scaled, atol=1e-6, rtol=1e-5)
    counts, live = torch.zeros(32, dtype=torch.int64, device=DEVICE), torch.tensor([20], dtype=torch.int32, device=DEVICE)
    picks, _ = route(logits.to(DEVICE), None, Routing(32, 4), counts, live)
    assert torch.equal(counts.cpu(), torch.bincount(picks[:20].flatten().long().cpu(), minlength=32))
    picks, _ = route(torch.zeros(2, EXPERTS, device=DEVICE), None, Routing(EXPERTS, 3))
    assert picks.tolist() == [[0, 1, 2]] * 2


def test_picks_of_all() -> None:
    """Experts that every token takes come behind its own, with weight 1, and are not counted."""
    for routing in (Routing(20, 3, "sigmoid", True, 2.5, shared=2), Routing(32, 4, shared=1)):
        logits = random(9, routing.experts, seed=3)
        wanted, scaled = reference(logits, None, routing)
        assert wanted[:, routing.picks:].tolist() == [list(range(routing.experts, routing.experts + routing.shared))] * 9
        assert (scaled[:, routing.picks:] == 1.0).all() and not scaled[:, :routing.picks].eq(1.0).any()
        counts = torch.zeros(routing.experts, dtype=torch.int64, device=DEVICE)
        picks, weights = route(logits.to(DEVICE), None, routing, counts)
        assert torch.equal(picks.cpu(), wanted) and int(counts.sum()) == 9 * routing.picks
        torch.testing.assert_close(weights.cpu(), scaled, atol=1e-6, rtol=1e-5)


def test_every_size_has_a_plan_whose_tiles_fit_together() -> None:
    for tokens in (1, 3, 4, 5, 32, 64, 65, 128, 200, 256, 500, 2048, 8192):
        for picks, experts in ((8, 128), (6, 64), (1, 16), (2, 8), (4, 32)):
            plan = choose(tokens, picks, experts)
            assert not plan.sort or plan.up.tall == plan.down.tall
            assert plan.sort or plan.up.tall == 1 or tokens * picks <= 64
            assert choose(tokens, picks, experts, invariant=True).up.tall > 1
    # Two programs of 4 warps share a multiprocessor where sums are short.
    assert [choose(8192, 8, 128, short=short).down.warps for short in (False, True)] == [8, 4]


@pytest.mark.skipif(DEVICE.type == "cpu", reason="real sizes need a GPU")
def test_a_token_among_thousands() -> None:
    """Batch-invariant: equal bits over every plan that `choose` knows, at a real shape."""
    ops, case = InvariantExperts(), Case(4096, 64, 6, 2048, 1408)
    held = inputs(case, torch.bfloat16)
    there = {name: tensor.to(DEVICE) for name, tensor in held.items() if tensor is not None}
    up, down = ops.pack(there.pop("up")), ops.pack(there.pop("down"))
    whole = ops.apply(**there, up=up, down=down, glu=Glu())
    for count in (1, 2, 5, 16, 40, 100, 300, 700, 1500, 3000):
        for begin in (0, 4096 - count):
            part = {name: tensor[begin:begin + count] for name, tensor in there.items()}
            assert torch.equal(ops.apply(**part, up=up, down=down, glu=Glu()), whole[begin:begin + count]), (count, begin)


@pytest.mark.parametrize("scheme", [None, FP8()], ids=str)
def test_products_of_picks(scheme: Scheme | None) -> None:
    """Each row with its own matrix, in more than one launch; -1 is no pick."""
    x, matrices, bias = random(600, 64, seed=1), random(5, 48, 64, seed=2), random(5, 48, seed=3).half()
    x, picks = x.half(), torch.arange(600, dtype=torch.int32) % 6 - 1
    if scheme is None:
        matrices = matrices.half()
        stack = OPS.pack(matrices.to(DEVICE))
    else:
        parts = scheme.encode(matrices.flatten(0, 1))
        matrices = scheme.decode(parts, torch.float32).view(5, 48, 64)
        stack = OPS.pack_stored(scheme, {name: part.to(DEVICE) for name, part in parts.items()}, 5, (48, 64), torch.float16)
    got = OPS.products(x.to(DEVICE), picks.to(DEVICE), stack, bias.to(DEVICE)).cpu()
    wanted = torch.einsum("pk,pnk->pn", x.double(), matrices.double()[picks.clamp(min=0)]) + bias.double()[picks.clamp(min=0)]
    close(got[picks >= 0], wanted[picks >= 0], 8.0, factor=8)
