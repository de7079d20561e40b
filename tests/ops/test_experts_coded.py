"""Grouped GEMMs of quantized experts against the scheme's definition, expert by expert; interpreted where there is no GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from penstock.core.rank import DeviceFacts
from penstock.models import describe
from penstock.ops import experts_coded
from penstock.ops.coded_triton import decoded, quantized
from penstock.ops.experts import ExpertsOps, Glu, Stack
from penstock.ops.experts_coded import CodedStack
from penstock.ops.experts_triton import Plan, Tile, TritonExperts, choose_coded, launch
from penstock.ops.registry import bind
from penstock.quant.fp8 import FP8
from penstock.quant.gguf import GGUF
from penstock.quant.integer import Grouped, Int8
from penstock.quant.microscaling import MXFP4, MXFP8, NVFP4
from penstock.quant.normal import Table4
from penstock.worker.memory import packed_bytes
from tests.ops.interpreter import DEVICE, DTYPES
from tests.ops.kernels import close, random
from tests.ops.test_experts import GLUS, Case, inputs

OPS = TritonExperts()
SCHEMES: list[Any] = [
    FP8(), FP8("token"), FP8("tensor"), FP8(block=(128, 128)), FP8("group", (128, 128)), Int8(), Int8("token"), MXFP4(),
    MXFP8(), NVFP4(), Table4("nf4", 64), Grouped(4, 128), Grouped(4, 128, "uint8"), Grouped(4, 32, "float16"), Grouped(4, 0),
    Grouped(8, 64), Grouped(3, 32), GGUF("q4_1"), GGUF("q8_0")]
PLANS = {
    "one by one": Plan(Tile(1, 16, 256, stages=2), Tile(1, 8, 128, stages=3), False),
    "unsorted": Plan(Tile(16, 32, 128, stages=2, swap=True), Tile(16, 64, 256, stages=2, swap=True), False),
    "sorted": Plan(Tile(32, 64, 128, stages=2, swap=True), Tile(32, 32, 128, stages=2, swap=True), True),
}
BOXED = [Plan(Tile(64, 32, 128, stages=2, swap=True), Tile(64, 64, 128, stages=2, boxed=True, group=4), True),
         Plan(*[Tile(64, 64, 128, stages=2, boxed=True, group=4)] * 2, True)]
SIZES = [Case(3, 5, 2, 256, 128), Case(9, 5, 2, 256, 128), Case(21, 3, 2, 384, 256)]


@dataclass
class Definition(ExpertsOps):
    """The reference, with activations as the kernels round them (Triton's interpreter rounds to FP8 in its own way; how it
    should is in test_coded_triton.py)."""

    coded: dict[int, CodedStack]
    """By the width of a stack's matrices."""

    def product(self, x: torch.Tensor, stack: Stack, expert: int, bias: torch.Tensor | None) -> torch.Tensor:
        weight, rounded = self.coded[stack.k].coded, x.double()
        if weight.scaled != "none":
            codes, scales = quantized(x, weight)
            each = scales.T if scales.shape[0] == 1 else scales.T.repeat_interleave(weight.unit, 1)[:, :x.shape[1]]
            rounded = codes.double() * each.double()
        return F.linear(rounded, stack.data[expert].double(), None if bias is None else bias.double()).to(x.dtype)


def stored(scheme: Any, matrices: torch.Tensor, dtype: torch.dtype) -> tuple[CodedStack, torch.Tensor]:
    """A stack as the kernels read it, and what it stands for."""
    count, n, k = matrices.shape
    parts = {suffix: part.to(DEVICE) for suffix, part in scheme.encode(matrices.flatten(0, 1).float()).items()}
    if "input_scale" in parts:
        parts["input_scale"] = torch.full((1,), 0.02, device=DEVICE)
    stack = OPS.pack_stored(scheme, parts, count, (n, k), dtype)
    assert isinstance(stack, CodedStack)
    return stack, scheme.decode(parts, torch.float32).view(count, n, k)


def found(scheme: Any, plan: Plan, case: Case, dtype: torch.dtype, biased: bool = False, glu: Glu = GLUS["swiglu"],
          inward: bool = False, nobody: bool = False) -> None:
    held = inputs(case, dtype, biased)
    if nobody:
        held["picks"][::2, 0] = -1  # type: ignore[index]
    there = {name: None if tensor is None else tensor.to(DEVICE) for name, tensor in held.items()}
    up, wide = stored(scheme, there.pop("up"), dtype)  # type: ignore[arg-type]
    down, flat = stored(scheme, there.pop("down"), dtype)  # type: ignore[arg-type]
    got = launch(plan, up=up, down=down, glu=glu, inward=inward, **there)  # type: ignore[arg-type]
    oracle = Definition({up.k: up, down.k: down})
    wanted = oracle.apply(up=oracle.pack(wide), down=oracle.pack(flat), glu=glu, inward=inward, **there)  # type: ignore[arg-type]
    if up.coded.scaled == "none":
        close(got.cpu(), wanted.cpu().double(), 1.0, factor=8)
    else:  # a sum's last bit may move a code of the next product
        error = (got.double() - wanted.double()).norm() / wanted.double().norm()
        assert error.item() < 2e-2, (scheme, case, error)


@pytest.mark.parametrize("scheme", [FP8("group", (128, 128)), MXFP4(), Grouped(4, 128, "uint8")], ids=str)
def test_biases_activations_and_weights_that_multiply_inputs(scheme: Any) -> None:
    for plan in PLANS.values():
        found(scheme, plan, SIZES[1], torch.float16, True, GLUS["clamped"])
        found(scheme, plan, SIZES[1], torch.float16, True, inward=True)


def test_one_token_of_codes_of_rows() -> None:
    """As by the kernel for codes of any scheme, although inner results are rounded within the second product here."""
    for scheme, case in ((FP8("token"), Case(1, 5, 2, 256, 512)), (FP8("tensor"), Case(1, 7, 3, 384, 640))):
        drawn = inputs(case, torch.float16, True)
        held: dict[str, Any] = {name: part.to(DEVICE) for name, part in drawn.items() if part is not None}
        held["picks"][0, 0] = -1
        held |= {name: stored(scheme, held[name], torch.float16)[0] for name in ("up", "down")}
        plan = choose_coded(1, case.picks, held["up"], held["down"])
        assert plan.up.tall == plan.down.tall == 1 and plan.up.ahead and plan.down.ahead
        for inward in (False, True):
            got, wanted = (launch(one, glu=GLUS["clamped"], inward=inward, **held).double()
                           for one in (plan, PLANS["one by one"]))
            # On a card sums of four are rounded to float16, which may move codes of inner results.
            assert (got - wanted).norm() < (1e-2 if DEVICE.type == "cuda" else 5e-3) * wanted.norm(), (scheme, inward)


def test_codes_of_rows_by_tma() -> None:
    for case in (SIZES[1], Case(150, 3, 2, 384, 128)):
        for plan in BOXED:
            found(FP8("token"), plan, case, torch.float16, True)


def test_sizes_that_no_tile_divides() -> None:
    """Experts whose rows end within a panel of codes, columns that no unit divides, one scheme above and another below."""
    case = Case(11, 7, 3, 96, 160)
    for plan in PLANS.values():
        found(MXFP4(), plan, case, torch.float16)
        found(Grouped(4, 32, "float16"), plan, case, torch.float16)
    held = {name: tensor.to(DEVICE) for name, tensor in inputs(case, torch.float16).items() if tensor is not None}
    (up, wide), (down, flat) = stored(MXFP4(), held.pop("up"), torch.float16), stored(Int8(), held.pop("down"), torch.float16)
    plain = Definition({up.k: up, down.k: down})
    for one, other in ((up, OPS.pack(flat.half())), (OPS.pack(wide.half()), down), (up, down)):
        got = one.grouped.apply(up=one, down=other, glu=Glu(), **held)
        close(got.cpu(), plain.apply(up=plain.pack(wide), down=plain.pack(flat), glu=Glu(), **held).cpu(), 1.0, factor=16)


def test_packing_in_runs() -> None:
    """Packing some experts at a time gives the same as packing all at once."""
    for scheme in (Grouped(4, 128, "uint8"), FP8("token"), NVFP4()):
        matrices = random(6, 192, 256, seed=1)
        whole = stored(scheme, matrices, torch.float16)[0].coded
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(experts_coded, "_AT_ONCE", 1)
            runs = stored(scheme, matrices, torch.float16)[0].coded
        ids = torch.arange(6 * 192, device=DEVICE)
        assert torch.equal(decoded(whole, torch.float16, ids), decoded(runs, torch.float16, ids))
        assert torch.equal(whole.data.view(torch.int8), runs.data.view(torch.int8))


def test_a_matrix_can_be_moved() -> None:
    for scheme in (Grouped(4, 128, "uint8"), FP8("group", (128, 128)), NVFP4()):
        stack, matrices = stored(scheme, random(4, 128, 256, seed=1), torch.float16)
        for part, now in zip(stack.matrix(3), [part.clone() for part in stack.matrix(1)], strict=True):
            part.copy_(now)
        rows = torch.arange(3 * 128, 4 * 128, device=DEVICE)
        torch.testing.assert_close(decoded(stack.coded, torch.float32, rows), matrices[1], rtol=2e-3, atol=2e-3)


def test_every_number_of_tokens_has_tiles_that_fit_together() -> None:
    for scheme in (FP8("group", (128, 128)), FP8("token"), MXFP4()):
        stack, _ = stored(scheme, random(8, 256, 128), torch.float16)
        for tokens in (1, 4, 5, 50, 256, 257, 1500, 35000):
            for invariant in (False, True):
                plan = choose_coded(tokens, 2, stack, stack, invariant, boxes=True)
                assert plan.down.boxed == (tokens >= 256 and not invariant and scheme == FP8("token"))
                assert plan.up.tall == plan.down.tall and (plan.sort or tokens <= 32)
                assert plan.up.tall >= 16 or (tokens <= 4 and not invariant), "one by one is another order of sums"


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_sum(scheme: Any) -> None:
    for dtype, plan, case in zip(DTYPES[1:] * 3, PLANS.values(), SIZES, strict=False):
        found(scheme, plan, case, dtype, nobody=True)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the facts of a GPU are made up")
def test_memory_is_counted_as_the_kernels_hold_it() -> None:
    """gpt-oss's experts stay in 4 bits, unless plain ones are asked for."""
    facts = DeviceFacts("cuda", "a GPU", 1 << 37, 16, frozenset(), (9, 0))
    config = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 256, "intermediate_size": 256,
              "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
              "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128, "max_position_embeddings": 1024,
              "layer_types": ["sliding_attention", "full_attention"]}
    plain, stored = (describe(config | more) for more in ({}, {"quantization_config": {"quant_method": "mxfp4"}}))
    bound = bind(facts, torch.bfloat16)
    before, after = packed_bytes(plain, torch.bfloat16, bound), packed_bytes(stored, torch.bfloat16, bound)
    experts = 2 * 8 * 3 * 256 * 256
    assert before == plain.nbytes("bfloat16") and before - after == experts * 2 - experts * 18 // 32, "scales take 16 bits"
    assert packed_bytes(stored, torch.bfloat16, bind(facts, torch.bfloat16, {"experts.mxfp4": "reference"})) == before
