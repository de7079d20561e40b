"""Mixtures of experts against a plain sum in float64, and the bits of a token in any company."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from penstock.ops.experts import ExpertsOps, Glu, Stack
from penstock.ops.linear import LinearOps
from penstock.ops.registry import implementations
from penstock.ops.table import Implementation
from tests.ops.kernels import DTYPES, close, random, usable

GLUS = {"swiglu": Glu(), "clamped": Glu(alpha=1.702, limit=0.7, shift=1.0), "limited": Glu(limit=0.5), "geglu": Glu("gelu")}


class Case(NamedTuple):
    """T tokens, each with K of E experts of inner size F and width W."""

    tokens: int
    experts: int
    picks: int
    width: int
    inner: int


CASES = [Case(1, 1, 1, 8, 4), Case(1, 7, 3, 60, 28), Case(2, 5, 5, 33, 17), Case(9, 16, 2, 64, 96), Case(40, 6, 1, 48, 20),
         Case(130, 11, 4, 70, 130)]


def inputs(case: Case, dtype: torch.dtype, biased: bool = False) -> dict[str, torch.Tensor | None]:
    tokens, experts, picks, width, inner = case
    chosen = torch.stack([torch.randperm(experts, generator=torch.Generator().manual_seed(i))[:picks] for i in range(tokens)])
    biases = (random(experts, 2 * inner, dtype=dtype, seed=5), random(experts, width, dtype=dtype, seed=6))
    return {"x": random(tokens, width, dtype=dtype, seed=1), "picks": chosen.int(),
            "weights": random(tokens, picks, seed=2).softmax(-1),
            "up": (random(experts, 2 * inner, width, seed=3) * width**-0.5).to(dtype),
            "down": (random(experts, width, inner, seed=4) * inner**-0.5).to(dtype),
            "up_bias": biases[0] if biased else None, "down_bias": biases[1] if biased else None}


def plain(x: Any, picks: Any, weights: Any, up: Any, down: Any, up_bias: Any = None, down_bias: Any = None,
          glu: Glu = GLUS["swiglu"], inward: bool = False) -> torch.Tensor:
    """Token by token in float64; inner results rounded as implementations round them."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(len(x)):
        for e, weight in zip(picks[t].tolist(), weights[t].double(), strict=True):
            if e < 0:
                continue
            row = (x[t].double() * weight).to(x.dtype).double() if inward else x[t].double()
            inner = F.linear(row, up[e].double(), None if up_bias is None else up_bias[e].double())
            inner = glu(inner.to(x.dtype).double()).to(x.dtype).double()
            result = F.linear(inner, down[e].double(), None if down_bias is None else down_bias[e].double())
            out[t] += result if inward else result * weight
    return out


def run(ops: Any, held: dict[str, Any], glu: Glu = GLUS["swiglu"], inward: bool = False) -> torch.Tensor:
    packed = {**held, "up": ops.pack(held["up"]), "down": ops.pack(held["down"])}
    found: torch.Tensor = ops.apply(**packed, glu=glu, inward=inward)
    assert found.dtype == held["x"].dtype
    return found


def every() -> list[Any]:
    return [pytest.param(i, id=i.name) for i in implementations("experts")]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", every())
def test_sum(implementation: Implementation, dtype: torch.dtype) -> None:
    ops = usable(implementation, dtype)
    for case in CASES:
        held = inputs(case, dtype)
        close(run(ops, held), plain(**held), 1.0, factor=6)


@pytest.mark.parametrize("glu", GLUS.values(), ids=GLUS)
@pytest.mark.parametrize("implementation", every())
def test_biases_and_activations(implementation: Implementation, glu: Glu) -> None:
    ops = usable(implementation, torch.float32)
    for case in CASES[1:4]:
        for biased in (False, True):
            held = inputs(case, torch.float32, biased)
            close(run(ops, held, glu), plain(**held, glu=glu), 1.0, factor=6)
            close(run(ops, held, glu, inward=True), plain(**held, glu=glu, inward=True), 1.0, factor=6)


@pytest.mark.parametrize("implementation", every())
def test_nobody_and_everybody(implementation: Implementation) -> None:
    """Picks of nobody add nothing, all tokens may take one expert, and no token gives no result."""
    ops = usable(implementation, torch.float32)
    held = inputs(Case(50, 9, 3, 40, 24), torch.float32)
    held["picks"][:, 1] = -1
    held["picks"][7] = -1
    found = run(ops, held)
    close(found, plain(**held), 1.0, factor=6)
    assert not found[7].any()
    held["picks"] = torch.full((50, 3), 8, dtype=torch.int32)
    close(run(ops, held), plain(**held), 1.0, factor=6)
    empty = {**held, "x": held["x"][:0], "picks": held["picks"][:0], "weights": held["weights"][:0]}
    assert run(ops, empty).shape == (0, 40)


class OneByOne(ExpertsOps):
    """Stacks of matrices that the operation `linear` packs."""

    def pack(self, matrices: torch.Tensor) -> Stack:
        each = [LinearOps.pack(one) for one in matrices]
        for one in each:
            one.ops = LinearOps()
        return self.pack_each(each, matrices.dtype)


@pytest.mark.parametrize("inward", [False, True])
def test_products_one_after_another(inward: bool) -> None:
    ops, glu = OneByOne(), GLUS["clamped"]
    for case in CASES:
        held = inputs(case, torch.float32, biased=True)
        held["picks"][::3, 0] = -1
        close(run(ops, held, glu, inward), plain(**held, glu=glu, inward=inward), 1.0, factor=6)
        alone = {**held, "x": held["x"][-1:], "picks": held["picks"][-1:], "weights": held["weights"][-1:]}
        close(run(ops, alone, glu, inward), plain(**alone, glu=glu, inward=inward), 1.0, factor=6)
    empty = {**held, "x": held["x"][:0], "picks": held["picks"][:0], "weights": held["weights"][:0]}
    assert run(ops, empty).shape == (0, 70)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", every())
def test_a_token_in_any_company(implementation: Implementation, dtype: torch.dtype) -> None:
    """The bits of a token's result do not depend on who else picked its experts."""
    if not implementation.batch_invariant:
        pytest.skip("it does not promise that")
    ops = usable(implementation, dtype)
    held = inputs(Case(150, 5, 2, 72, 56), dtype)
    whole = run(ops, held)
    for begin, end in ((0, 1), (17, 18), (3, 6), (20, 37), (100, 150), (0, 149)):
        part = {**held, **{name: held[name][begin:end] for name in ("x", "picks", "weights")}}
        assert torch.equal(run(ops, part), whole[begin:end]), (begin, end)
