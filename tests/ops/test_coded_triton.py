"""Triton's products of quantized matrices against their scheme's definition in float64; interpreted where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.ops import coded_triton, gguf_codes
from penstock.ops.activation import gated
from penstock.ops.coded_forms import FP8 as FP8_TYPE, NAMES, CodedWeight
from penstock.ops.coded_triton import CodedTriton, Tile, launch, launch_codes, launch_fragments, launch_mixed, quantized
from penstock.quant.fp8 import FP8
from penstock.quant.gguf import GGUF
from penstock.quant.integer import Grouped, Int8
from penstock.quant.microscaling import MXFP4, MXFP8, NVFP4
from penstock.quant.normal import Table4
from tests.ops.interpreter import DEVICE, DTYPES, interpreter
from tests.ops.kernels import close, random
from tests.ops.test_coded_cpu import blocks
from tests.ops.test_linear_triton import in_order

HALF = [dtype for dtype in DTYPES if dtype != torch.float32]
WEIGHT_ONLY: list[Any] = [
    FP8(), FP8(block=(128, 128)), Int8(), MXFP4(), MXFP8(), NVFP4(), NVFP4(divides=True), Table4("nf4", 64), Table4("fp4", 128),
    Grouped(4, 128), Grouped(4, 128, "uint8"), Grouped(4, 64, scales="bfloat16"), Grouped(4, 32, "float16"), Grouped(4, 32),
    Grouped(4, 32, scales="float32"), Grouped(4, 0), Grouped(4, 0, "uint8"), Grouped(4, 128, ordered=True), Grouped(8, 128),
    Grouped(8, 64, "uint8"), Grouped(8, 32, "float32"), Grouped(8, 0), Grouped(2, 64), Grouped(3, 32, "uint8")]
ROUNDED: list[Any] = [FP8("token"), FP8("tensor"), FP8("group", (128, 128)), Int8("token"), Int8("tensor")]
CUTS = [Tile(16, 64, 1, stages=2), Tile(16, 64, 2, split=2), Tile(32, 128, 1, group=2),
        Tile(32, 64, 1, split=2, joined=True)]

SIZES = [(3, 70, 384), (17, 128, 640), (33, 192, 256), (5, 64, 640)]


def name(scheme: Any) -> str:
    return str(scheme)


def packed(scheme: Any, n: int, k: int, dtype: torch.dtype) -> tuple[CodedWeight, torch.Tensor, dict[str, torch.Tensor]]:
    """The matrix for the kernels, as its scheme decodes it in float32, and its parts."""
    parts = scheme.encode(random(n, k, seed=n).to(DEVICE))
    if "order" in parts:
        parts["order"] = torch.randperm(k, generator=torch.Generator().manual_seed(3)).to(parts["order"])
    if "input_scale" in parts:
        parts["input_scale"] = torch.full((1,), 0.02, device=DEVICE)
    assert {part.suffix for part in scheme.parts(n, k, "float16")} == parts.keys() and scheme.name in NAMES
    return CodedTriton.pack(scheme, parts, (n, k), dtype), scheme.decode(parts, torch.float32), parts


def operand(x: torch.Tensor, weight: CodedWeight) -> torch.Tensor:
    return x if weight.order is None else x.index_select(1, weight.order)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", WEIGHT_ONLY, ids=name)
def test_product(scheme: Any, dtype: torch.dtype) -> None:
    """Sizes that no tile divides, strided rows, bias, results in float32, both orders of operands, K divided or not."""
    for cut, (rows, n, k) in list(zip(CUTS, SIZES, strict=True))[dtype == torch.float32::2]:
        weight, matrix, _ = packed(scheme, n, k, dtype)
        x, bias = random(rows, k + 16, seed=1).to(dtype).to(DEVICE)[:, 8:8 + k], random(n, seed=2).to(dtype).to(DEVICE)
        exact = x.double() @ matrix.double().T
        cut = cut._replace(deep=min(cut.deep, coded_triton.fitting(weight, 256)))
        found = launch(cut, operand(x, weight), None, weight, bias, torch.float32)
        # Tables are rounded to the type of x, zeros that are no integers, times their scales, to 16 bits.
        lossy = weight.form == "shifts"
        close(found.to(torch.float16 if lossy else dtype), exact + bias.double(), (8 if lossy else 2) * k ** 0.5, factor=2)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("scheme", [Grouped(4, 128), Grouped(4, 128, "uint8"), Grouped(4, 0), Grouped(4, 0, "uint8"),
                                    Grouped(4, 128, "float16"), Grouped(4, 128, ordered=True), Grouped(3, 128, "uint8"),
                                    Grouped(4, 64, "uint8"), Grouped(4, 32), Grouped(4, 32, scales="float32")], ids=name)
def test_fragments(scheme: Any, dtype: torch.dtype) -> None:
    """Up to 8 rows: units that no step divides, columns that no unit does, strided rows, bias, the gated form."""
    for rows, n, k, cut in ((1, 24, 1408, None), (2, 24, 640, (2, 1, 2, 2, 128)), (3, 38, 384, (4, 1, 4, 1, None)),
                            (5, 40, 640, (8, 2, 4, 2, 128)), (8, 128, 512, None)):
        weight, matrix, _ = packed(scheme, n, k, dtype)
        x, bias = random(rows, k + 16, seed=1).to(dtype).to(DEVICE)[:, 8:8 + k], random(n, seed=2).to(dtype).to(DEVICE)
        assert coded_triton.fragmented(x, weight) and not coded_triton.fragmented(x[:, 1:], weight)
        exact = x.double() @ matrix.double().T + bias.double()
        found = launch_fragments(operand(x, weight), weight, bias, torch.float32, None, cut)
        close(found.to(torch.float16), exact, (24 if weight.form == "shifts" else 2) * k ** 0.5, factor=2)
    half = gated(exact, "silu")
    for rows in (1, 8) if weight.form != "shifts" else ():
        found = launch_fragments(operand(x, weight)[:rows], weight, bias, dtype, "silu")
        close(found, half[:rows], 16 * k ** 0.5, factor=4)


@pytest.mark.parametrize("scheme", [FP8(), FP8("token"), FP8("tensor")], ids=name)
def test_one_row_of_codes(scheme: Any) -> None:
    """Without tensor cores: x is rounded as by the kernel that quantizes many rows; bias, the gated form."""
    for n, k in ((70, 384), (64, 4096), (128, 8448)):
        weight, matrix, _ = packed(scheme, n, k, torch.bfloat16)
        x, bias = random(1, k, seed=1).bfloat16().to(DEVICE), random(n, seed=2).bfloat16().to(DEVICE)
        assert coded_triton.readable(x, weight) and not coded_triton.readable(x.expand(2, -1), weight)
        rounded = x
        if weight.scaled != "none":
            codes, scales = quantized(x, weight)
            rounded = codes.double() * scales.double().T
        exact = rounded.double() @ matrix.double().T + bias.double()
        close(launch_codes(x, weight, bias, torch.float32).to(torch.float16), exact, 4 * k ** 0.5, factor=2)
    close(launch_codes(x, weight, bias, torch.bfloat16, "silu"), gated(exact, "silu"), 16 * k ** 0.5, factor=4)


def test_fragments_serve_few_rows_of_integers() -> None:
    """Matrices of other codes, more rows and rows that 16 bytes do not divide go to `product`."""
    x = random(8, 384).half()
    for scheme, served in ((Grouped(4, 128), True), (Grouped(4, 32), True), (MXFP4(), False), (Grouped(8, 128), False)):
        weight, _, _ = packed(scheme, 64, 384, torch.float16)
        assert coded_triton.fragmented(x, weight) == coded_triton.fragmented(x[:1], weight) == served
        assert not any(coded_triton.fragmented(y, weight) for y in (x.float(), x[:, 1:], x[:1].expand(9, -1)))


FOUR: list[Any] = [scheme for scheme in WEIGHT_ONLY if isinstance(scheme, Grouped) and scheme.bits < 8] + [
    MXFP4(), NVFP4(), NVFP4(divides=True), GGUF("q4_0"), GGUF("q4_k")]


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="wgmma needs Hopper")
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("scheme", FOUR, ids=name)
def test_mixed(scheme: Any, dtype: torch.dtype) -> None:
    """Rows and columns that no program divides, parts of K, strided rows, bias, gains, the gated form; twice, as tickets and
    sums of parts are used again."""
    for rows, n, k in ((5, 640, 768), (65, 70, 768), (129, 384, 1280), (300, 4096, 2304), (1000, 640, 256)):
        k += 0 if isinstance(scheme, GGUF) or n != 384 else 96
        parts = {suffix: part.to(DEVICE) for suffix, part in (
            blocks("q4_k", n, k) if scheme == GGUF("q4_k") else scheme.encode(random(n, k, seed=n))).items()}
        weight = CodedTriton.pack(scheme, parts, (n, k), dtype)
        x, bias = random(rows, k + 16, seed=1).to(dtype).to(DEVICE)[:, 8:8 + k], random(n, seed=2).to(dtype).to(DEVICE)
        assert coded_triton.mixable(x, weight) and not any(coded_triton.mixable(y, weight) for y in (x.float(), x[:, 1:]))
        # Scales in float32 lose their last bits; factors of rows are exact where a decoded matrix is rounded after them.
        allowed = 3e-3 if weight.gains is not None else 1e-3 if weight.form == "float" else 1e-4
        exact = operand(x, weight).double() @ coded_triton.decoded(weight, dtype).double().T
        exact += bias.double()
        for _ in range(2):
            found = launch_mixed(operand(x, weight), weight, bias, torch.float32)
            assert (found.double() - exact).norm() < allowed * exact.norm(), (rows, n, k)
        if n % 128 == 0:
            half = gated(exact, "silu")
            found = launch_mixed(operand(x, weight), weight, bias, torch.float32, "silu")
            assert (found.double() - half).norm() < 8e-3 * half.norm(), (rows, n, k)


@pytest.mark.parametrize("kind", gguf_codes.NAMES)
def test_blocks_of_gguf(kind: str) -> None:
    """Products, whole matrices and rows; superblocks of any bytes, in rows of very different sizes."""
    scheme, n, k, rows = GGUF(kind), 70, 768, 5
    parts = blocks(kind, n, k) if kind.endswith("_k") else scheme.encode(random(n, k, seed=n) * 10.0 ** torch.arange(-3, 4)[
        torch.arange(n) % 7, None])
    parts = {suffix: part.to(DEVICE) for suffix, part in parts.items()}
    weight, matrix = CodedTriton.pack(scheme, parts, (n, k), torch.float16), scheme.decode(parts, torch.float32)
    size = matrix.abs().amax(1).clamp_min(1e-30)
    assert ((coded_triton.decoded(weight, torch.float32) - matrix).abs().amax(1) / size).max() < 1e-3
    ids = torch.tensor([0, 69, 5, 5], device=DEVICE)
    assert ((CodedTriton.gather(ids, weight).float() - matrix[ids]).abs().amax(1) / size[ids]).max() < 1e-3
    x = random(rows, k, seed=1).half().to(DEVICE)
    cut = Tile(16, 64, coded_triton.fitting(weight, 256), stages=2, swap=True)
    error = (launch(cut, x, None, weight, None, torch.float32) - x.float() @ matrix.T).abs() / size
    assert error.max() < 2e-3 * k**0.5


@pytest.mark.parametrize("scheme", [*WEIGHT_ONLY, *ROUNDED], ids=name)
def test_decoded_and_gathered(scheme: Any) -> None:
    """Whole matrices for the library, and rows as of an embedding."""
    weight, matrix, _ = packed(scheme, 70, 384, torch.float16)
    stored = coded_triton.decoded(weight, torch.float32)
    if weight.order is not None:
        stored = torch.empty_like(stored).index_copy_(1, weight.order, stored)
    torch.testing.assert_close(stored, matrix, rtol=2e-3, atol=2e-3)
    ids = torch.tensor([0, 69, 5, 5], device=DEVICE)
    torch.testing.assert_close(CodedTriton.gather(ids, weight).float(), matrix[ids], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("scheme", ROUNDED, ids=name)
def test_product_of_rounded_activations(scheme: Any, dtype: torch.dtype) -> None:
    """Activations are rounded as the scheme says; a row of zeros and a row of large numbers among them."""
    for cut, (rows, n, k) in zip(CUTS[:2], SIZES, strict=False):
        weight, matrix, parts = packed(scheme, n, k, dtype)
        x = random(rows, k + 16, seed=1).to(dtype).to(DEVICE)[:, 8:8 + k].clone()
        x[1], x[2] = 0, x[2] * 100
        codes, scales = quantized(x, weight)
        wanted = scheme.inputs(x.float(), parts)
        each = scales.T if scales.shape[0] == 1 else scales.T.repeat_interleave(weight.unit, 1)[:, :k]
        # A quotient may be rounded to the other side of a tie.
        off = (codes.float() * each - wanted).abs() > 1e-5 * wanted.abs().amax()
        assert off.float().mean() < (5e-2 if DEVICE.type == "cpu" and codes.dtype == FP8_TYPE else 2e-3)
        exact = (codes.double() * each.double()) @ matrix.double().T
        found = launch(cut._replace(deep=1), codes, scales, weight, None, torch.float32)
        # Tensor cores add products of FP8 codes with 13 bits behind the point, whatever is added to.
        factor = 64 if DEVICE.type != "cpu" and codes.dtype == FP8_TYPE else 4
        close(found, exact, 2 * k ** 0.5 * 100, factor=factor)
        close(found[:2], exact[:2], 2 * k ** 0.5, factor=factor)


def test_the_library_takes_rows_of_blocks_by_multiples(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS refuses 65 rows; a stand-in does, too, and multiplies what it is given in float64."""
    scheme = FP8("group", (128, 128))
    weight, matrix, _ = packed(scheme, 128, 256, torch.bfloat16)

    def multiplied(x: torch.Tensor, codes: torch.Tensor, left: torch.Tensor, right: torch.Tensor, out_dtype: torch.dtype,
                   use_fast_accum: bool) -> torch.Tensor:
        assert len(x) % 16 == 0 and left.shape == (len(x), 2) and right.shape == (2, 1) and not use_fast_accum
        each, whole = (part.double().repeat_interleave(128, side) for side, part in ((1, left), (0, right)))
        return ((x.double() * each) @ (codes.double() * whole)).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", multiplied)
    for rows in (65, 80):
        codes, scales = quantized(random(rows, 256, seed=1).bfloat16().to(DEVICE), weight)
        found = coded_triton._library(codes, scales, weight, None, torch.bfloat16, None)
        exact = (codes.double() * scales.T.double().repeat_interleave(128, 1)) @ matrix.double().T
        assert found.shape == (rows, 128) and ((found.double() - exact).norm() / exact.norm()).item() < 6e-3


@pytest.mark.parametrize("scheme", [Grouped(4, 128), FP8("token"), FP8("group", (128, 128)), NVFP4()], ids=name)
def test_gate_within_a_product(scheme: Any) -> None:
    """The same as the product followed by the operation; halves that no panel divides are computed apart."""
    ops = CodedTriton(False)
    for n in (256, 140):
        weight, _, _ = packed(scheme, n, 256, torch.float16)
        x, bias = random(3, 256, seed=1).half().to(DEVICE), random(n, seed=2).half().to(DEVICE)
        apart = gated(ops.apply(x, weight, bias), "silu")
        torch.testing.assert_close(ops.gated(x, weight, bias, "silu"), apart, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("scheme", [Grouped(4, 128), Grouped(4, 32, "uint8"), FP8("token")],
                         ids=name)
def test_a_row_in_any_company(scheme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the batch-invariant mode the bits of a row are the same alone, among others, anywhere."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", in_order)
    n, k = (64, 1024) if DEVICE.type == "cpu" else (512, 4096)
    ops, (weight, _, _) = CodedTriton(True), packed(scheme, n, k, torch.float16)
    x = random(140, k, seed=1).half().to(DEVICE)
    whole = ops.apply(x, weight, None, torch.float32)
    for begin, end in ((0, 1), (5, 12), (1, 71)):
        assert torch.equal(ops.apply(x[begin:end], weight, None, torch.float32), whole[begin:end]), (begin, end)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="real sizes and the library need a GPU")
@pytest.mark.parametrize("scheme", [*WEIGHT_ONLY, *ROUNDED], ids=name)
def test_whatever_serves(scheme: Any) -> None:
    """Rows on both sides of every boundary, at real sizes, in bfloat16."""
    for n, k in ((4096, 4096), (1024, 14336)):
        weight, matrix, parts = packed(scheme, n, k, torch.bfloat16)
        for rows in (0, 1, 9, 33, 65, 200, 700, 2100):
            x = random(rows, k, seed=rows).bfloat16().to(DEVICE)
            exact = scheme.inputs(x.float(), parts).double() @ matrix.double().T
            found = CodedTriton(False).apply(x, weight, None)
            assert rows == 0 or ((found.double() - exact).norm() / exact.norm()).item() < 6e-3, (scheme, n, rows)
