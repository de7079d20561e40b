"""Integer products with quantized matrices on CPUs, against their scheme's definition, and the bits of a row in any company."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.ops import bits, native
from penstock.ops.coded_cpu import NAMES
from penstock.ops.table import Implementation
from penstock.quant.fp8 import FP8
from penstock.quant.gguf import GGUF
from penstock.quant.integer import Grouped, Int8
from tests.ops.kernels import every, random, usable

SCHEMES: list[Any] = [
    *(GGUF(kind) for kind in ("q8_0", "q4_0", "q4_1", "q4_k", "q5_k", "q6_k")), Int8(), Int8("token"), Int8("tensor"),
    Grouped(4, 128), Grouped(4, 32, "uint8"), Grouped(4, 64, "float16"), Grouped(4, 0), Grouped(4, 0, "uint8"),
    Grouped(4, 128, ordered=True), Grouped(8, 128), Grouped(8, 32, "uint8"), Grouped(8, 0), Grouped(2, 64),
    Grouped(3, 32, "uint8")]
FP8S = [FP8(), FP8("token"), FP8("tensor"), FP8(block=(128, 128)), FP8("group", (128, 128))]


def name(scheme: Any) -> str:
    return str(scheme)


def blocks(kind: str, n: int, k: int) -> dict[str, torch.Tensor]:
    """Any bytes, but for the float16 numbers of a k-quant."""
    size, at, count = {"q4_k": (144, 0, 2), "q5_k": (176, 0, 2), "q6_k": (210, 208, 1)}[kind]
    generator = torch.Generator().manual_seed(n)
    found = torch.randint(0, 256, (n, k // 256, size), generator=generator, dtype=torch.uint8)
    found[..., at:at + 2 * count] = (random(n, k // 256, count).abs() * 1e-3).half().view(torch.uint8)
    return {"weight": found.flatten(1)}


def packed(linear: Any, scheme: Any, n: int, k: int, dtype: torch.dtype) -> tuple[Any, torch.Tensor, dict[str, torch.Tensor]]:
    parts = blocks(scheme.name, n, k) if scheme.name.endswith("_k") else scheme.encode(random(n, k, seed=n))
    if "order" in parts:
        parts["order"] = torch.randperm(k, generator=torch.Generator().manual_seed(3)).to(torch.int32)
    if "input_scale" in parts:
        parts["input_scale"] = torch.full((1,), 0.02)
    assert scheme.name in NAMES
    return linear.pack(scheme, parts, (n, k), dtype), scheme.decode(parts, torch.float32), parts


def rounded(x: torch.Tensor, scheme: Any, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """x as the kernels take it: int8 by blocks of 32 columns as they are stored, or as the scheme says."""
    if getattr(scheme, "activation", "none") == "tensor":  # kernels saturate at -127, as the code -128 has no opposite
        return scheme.inputs(x.clamp(min=-127 * parts["input_scale"].item()), parts).double()
    if getattr(scheme, "activation", "none") != "none":
        return scheme.inputs(x, parts).double()
    order = parts["order"].long() if "order" in parts else torch.arange(x.shape[1])
    blocks = x[:, order].unflatten(1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    found = torch.empty_like(x, dtype=torch.float64)
    found[:, order] = (torch.round(blocks * (1 / scale.clamp_min(1e-30))) * scale).double().flatten(1)
    return found


@pytest.mark.parametrize("scheme", SCHEMES, ids=name)
@pytest.mark.parametrize("implementation", every("linear.q4_0"))
def test_product(implementation: Implementation, scheme: Any) -> None:
    """Rows that no tile divides, strided, more than one pass; bias, types, results in float32."""
    linear = usable(implementation, torch.float32)
    for rows, n, k, dtype in ((1, 33, 256, torch.float32), (3, 16, 512, torch.bfloat16), (13, 70, 768, torch.float16),
                              (261, 20, 256, torch.float32)):
        weight, matrix, parts = packed(linear, scheme, n, k, dtype)
        x, bias = random(rows, k + 16, seed=1).to(dtype)[:, 8:8 + k], random(n, seed=2).to(dtype)
        x = x * torch.logspace(-2, 2, rows)[:, None].to(dtype)
        wanted = rounded(x.float(), scheme, parts) @ matrix.double().T + bias.double()
        found = linear.apply(x, weight, bias, torch.float32)
        # A quotient may be rounded to the other side of a tie: one code of a row is then off by one.
        off = (found.double() - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert off.max() < 2e-3 and off.median() < 1e-4, (scheme, rows, off.max())
        torch.testing.assert_close(linear.apply(x, weight, bias), found.to(dtype))
        assert linear.apply(x[:0], weight).shape == (0, n)
        real = x.double() @ matrix.double().T
        exact = ((linear.apply(x, weight, None, torch.float32).double() - real).norm() / real.norm()).item()
        assert exact < 0.012 or rows > 3 or getattr(scheme, "activation", "none") == "tensor", "what the file's head says"


@pytest.mark.parametrize("scheme", [*(GGUF(kind) for kind in ("q4_0", "q4_1", "q4_k", "q5_k", "q6_k", "q8_0")),
                                    Grouped(4, 32, "uint8")], ids=name)
@pytest.mark.parametrize("implementation", every("linear.q4_0"))
def test_largest_codes(implementation: Implementation, scheme: Any) -> None:
    """Sums of 16 bits hold the largest codes of a block times the largest of x."""
    linear = usable(implementation, torch.float32)
    parts = scheme.encode(random(16, 256)) if not scheme.name.endswith("_k") else blocks(scheme.name, 16, 256)
    size, begin, end = {"q4_0": (18, 2, 18), "q4_1": (20, 4, 20), "q8_0": (34, 2, 34), "q4_k": (144, 16, 144),
                        "q5_k": (176, 16, 176), "q6_k": (210, 0, 192)}.get(scheme.name, (1, 0, 1))
    parts["weight"].view(16, -1, size)[..., begin:end] = 255 if scheme.name != "q8_0" else 129
    weight, matrix = linear.pack(scheme, parts, (16, 256), torch.float32), scheme.decode(parts, torch.float32)
    for rows in (1, 3, 70):
        x = torch.full((rows, 256), 2.54) * (-1) ** torch.arange(rows)[:, None]
        torch.testing.assert_close(linear.apply(x, weight), (x.double() @ matrix.double().T).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES, ids=name)
@pytest.mark.parametrize("implementation", every("linear.q4_0"))
def test_gather(implementation: Implementation, scheme: Any) -> None:
    linear = usable(implementation, torch.float32)
    weight, matrix, _ = packed(linear, scheme, 37, 512, torch.float32)
    ids = torch.tensor([0, 36, 5, 5, 16], dtype=torch.int32)
    torch.testing.assert_close(linear.gather(ids, weight), matrix[ids.long()], rtol=1e-5, atol=1e-5)
    with pytest.raises(IndexError):
        linear.gather(torch.tensor([37]), weight)


@pytest.mark.parametrize("scheme", [GGUF("q4_k"), GGUF("q6_k"), Int8("token"), Grouped(4, 32, "uint8")], ids=name)
@pytest.mark.parametrize("implementation", every("linear.q4_0"))
def test_a_row_in_any_company(implementation: Implementation, scheme: Any) -> None:
    """The bits of an output row do not depend on how many rows there are or where it stands."""
    linear = usable(implementation, torch.float32)
    weight, _, _ = packed(linear, scheme, 50, 512, torch.bfloat16)
    x = random(300, 512, seed=2).bfloat16()
    whole = linear.apply(x, weight, None, torch.float32)
    for begin, end in ((0, 1), (7, 9), (3, 20), (100, 133), (250, 300)):
        assert torch.equal(linear.apply(x[begin:end], weight, None, torch.float32), whole[begin:end]), (begin, end)


def test_instruction_sets_agree() -> None:
    """Sums of blocks are integers, and blocks are added in one order: every library gives the same bits, but for what an
    instruction set without FMA rounds twice."""
    found = {}
    for implementation in every("linear.q6_k"):
        one = implementation.values[0]
        if one.name == "cpu-portable":
            continue
        for scheme in (GGUF("q4_k"), GGUF("q5_k"), GGUF("q6_k"), GGUF("q8_0"), Grouped(4, 128)):
            try:
                linear = usable(one, torch.float32)
            except pytest.skip.Exception:
                continue
            weight, _, _ = packed(linear, scheme, 50, 512, torch.float32)
            found.setdefault(str(scheme), []).append(linear.apply(random(70, 512, seed=2), weight))
    for each in found.values():
        assert all(torch.equal(one, each[0]) for one in each)


@pytest.mark.parametrize("scheme", FP8S, ids=name)
@pytest.mark.parametrize("implementation", every("linear.fp8"))
def test_fp8(implementation: Implementation, scheme: FP8) -> None:
    """Sums of float32, subnormal codes, rows of zeros, columns that no chunk divides; one row's bits in any company; rows."""
    linear = usable(implementation, torch.float32)
    for rows, n, k, dtype in ((1, 33, 256, torch.float32), (3, 16, 500, torch.bfloat16), (14, 150, 768, torch.float16),
                              (530, 20, 256, torch.float32)):
        parts = scheme.encode(random(n, k, seed=n) * torch.logspace(-4, 0, n)[:, None])
        if "input_scale" in parts:
            parts["input_scale"] = torch.full((1,), 0.02)
        weight, matrix = linear.pack(scheme, parts, (n, k), dtype), scheme.decode(parts, torch.float32)
        x, bias = random(rows, k + 16, seed=1).to(dtype)[:, 8:8 + k], random(n, seed=2).to(dtype)
        x = x * torch.logspace(-2, 2, rows)[:, None].to(dtype)
        x[0, :256] *= rows < 500
        wanted = scheme.inputs(x.float(), parts).double() @ matrix.double().T + bias.double()
        found = linear.apply(x, weight, bias, torch.float32)
        off = (found.double() - wanted).abs() / (scheme.inputs(x.float(), parts).abs().double() @ matrix.abs().double().T + 1)
        assert off.max() < 2e-6, (rows, off.max())
        torch.testing.assert_close(linear.apply(x, weight, bias), found.to(dtype))
        for begin, end in ((0, 1), (rows // 2, rows)):
            assert torch.equal(linear.apply(x[begin:end], weight, bias, torch.float32), found[begin:end])
        ids = torch.tensor([0, n - 1, 5])
        assert torch.equal(linear.gather(ids, weight), scheme.decode(parts, dtype)[ids])
        assert linear.apply(x[:0], weight).shape == (0, n)
    with pytest.raises(IndexError):
        linear.gather(torch.tensor([n]), weight)


@pytest.mark.parametrize("implementation", every("linear.q4_0"))
def test_the_words_of_awq(implementation: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turned by the library, and by torch where there is none or tiles do not fit."""
    lib = usable(implementation, torch.float32).owner.lib
    for k, wide in ((128, 16), (384, 48), (2, 5), (128, 8)):
        words = torch.randint(-(1 << 31), 1 << 31, (k, wide), generator=torch.Generator().manual_seed(k)).to(torch.int32)
        each = []
        for one in (lib, None):
            monkeypatch.setattr(native, "loaded", lambda one=one: one)
            each.append(bits.turned(words))
        codes = torch.stack([words >> 4 * place & 15 for place in (0, 4, 1, 5, 2, 6, 3, 7)], -1).flatten(1).t().to(torch.uint8)
        assert torch.equal(each[0], each[1]) and torch.equal(bits.unpack(each[0], 4), codes)
