"""Quantized experts on a CPU: one call for all of them, whatever their scheme, equal to one product after another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.ops.coded_cpu import CodedPile
from penstock.ops.experts import ExpertsOps, Glu, Stack
from penstock.ops.registry import bind
from penstock.platform.facts import detect
from penstock.quant.fp8 import FP8
from penstock.quant.gguf import GGUF
from penstock.quant.integer import Grouped, Int8
from penstock.quant.microscaling import MXFP4
from penstock.quant.scheme import PLAIN, pack
from tests.ops.test_experts import GLUS, Case, inputs, plain

SCHEMES: list[Any] = [GGUF("q4_0"), GGUF("q8_0"), GGUF("q4_1"), Int8(), Int8("token"), Grouped(4, 32, "uint8"), Grouped(8, 0),
                      FP8(), FP8("token")]
CASES = [Case(1, 7, 3, 64, 96), Case(9, 5, 2, 96, 32), Case(300, 3, 1, 32, 64)]
KERNELS = {dtype: bind(detect("cpu"), dtype) for dtype in (torch.float32, torch.bfloat16)}


def stacked(scheme: Any, matrices: torch.Tensor, dtype: torch.dtype) -> Stack:
    flat = matrices.flatten(0, 1)
    parts = {"weight": flat} if scheme == PLAIN else scheme.encode(flat.float())
    found = pack(scheme, tuple(flat.shape), parts, dtype, KERNELS[dtype], len(matrices))
    assert isinstance(found, Stack)
    return found


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_all_experts_in_one_call(scheme: Any, dtype: torch.dtype) -> None:
    """Nobody's picks, biases, clamped activations, weights that multiply inputs, more rows than a pass of the kernel holds."""
    for case in CASES:
        held: dict[str, Any] = inputs(case, dtype, biased=True)
        held["picks"][::4, 0] = -1
        stood = {name: scheme.decode(scheme.encode(held[name].flatten(0, 1).float()), torch.float32).view(held[name].shape)
                 for name in ("up", "down")}
        up, down = stacked(scheme, held.pop("up"), dtype), stacked(scheme, held.pop("down"), dtype)
        assert isinstance(up, CodedPile) and isinstance(down, CodedPile)
        for glu, inward in ((Glu(), False), (GLUS["clamped"], True)):
            got = up.grouped.apply(**held, up=up, down=down, glu=glu, inward=inward)
            wanted = ExpertsOps().apply(**held, up=up, down=down, glu=glu, inward=inward)
            assert got.dtype == dtype and (dtype == torch.bfloat16 or error(got, wanted) < 4e-3)
            # The last bit of an inner result may move the code that it is rounded to, so both err, but alike.
            true = plain(**held, **stood, glu=glu, inward=inward)
            assert error(got, true) < 1.25 * error(wanted, true) + 1e-3
        for begin, end in ((0, 1), (case.tokens // 2, case.tokens)):
            some = {name: held[name][begin:end] if name in ("x", "picks", "weights") else held[name] for name in held}
            part = up.grouped.apply(**some, up=up, down=down, glu=glu, inward=inward)
            assert torch.equal(part, got[begin:end]), "a token's bits depend on others"
    empty = {name: held[name][:0] if name in ("x", "picks", "weights") else held[name] for name in held}
    assert up.grouped.apply(**empty, up=up, down=down, glu=Glu()).shape == (0, 32)


def test_they_share_one_piece_of_memory() -> None:
    """Codes, scales and factors of all experts lie in as many bytes as they have; moved elsewhere they are the same."""
    held: dict[str, Any] = inputs(CASES[0], torch.float32)
    up, down = (stacked(Int8(), held.pop(name), torch.float32) for name in ("up", "down"))
    assert isinstance(up, CodedPile)
    parts = [part for place in range(up.count) for part in up.matrix(place)]
    first = min(part.data_ptr() for part in parts)
    assert max(part.data_ptr() + part.nbytes for part in parts) - first <= sum(part.nbytes + 64 for part in parts)
    assert all(part.data_ptr() % 64 == first % 64 for part in parts)
    before = up.grouped.apply(**held, up=up, down=down, glu=Glu())
    kept = []

    def change(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x.clone()

    up.move(change)
    for one in kept:
        one.zero_()
    assert torch.equal(up.grouped.apply(**held, up=up, down=down, glu=Glu()), before)


@pytest.mark.parametrize("schemes", [(Int8(), PLAIN), (PLAIN, Int8()), (Int8(), Grouped(4, 32)), (FP8(), Int8()),
                                     (MXFP4(), Int8()), (MXFP4(), PLAIN)], ids=str)
def test_two_schemes(schemes: tuple[Any, Any]) -> None:
    """Also of such as have no integer products, whose matrices stay apart."""
    held: dict[str, Any] = inputs(Case(9, 5, 2, 64, 32), torch.float32)
    pairs = list(zip(schemes, (held.pop("up"), held.pop("down")), strict=True))
    up, down = (stacked(*pair, torch.float32) for pair in pairs)
    assert isinstance(up, CodedPile) == (schemes[0] not in (PLAIN, MXFP4()))
    stood = [one if scheme == PLAIN else scheme.decode(scheme.encode(one.flatten(0, 1)), torch.float32).view(one.shape)
             for scheme, one in pairs]
    got = up.grouped.apply(**held, up=up, down=down, glu=Glu())
    assert error(got, plain(**held | {"up": stood[0], "down": stood[1]})) < 2e-2
