"""Every scheme: what `encode` gives has the promised parts, decodes to nearly the matrix, and computes without a kernel."""

from __future__ import annotations

import pytest
import torch

from penstock.ops import bits, registry
from penstock.platform.facts import detect
from penstock.quant.fp8 import FP8
from penstock.quant.gguf import GGUF
from penstock.quant.integer import Grouped, Int8
from penstock.quant.microscaling import MXFP4, MXFP8, NVFP4
from penstock.quant.normal import Table4
from penstock.quant.scheme import Scheme, pack

SCHEMES: list[tuple[Scheme, float]] = [
    (FP8(), 0.03), (FP8("token"), 0.03), (FP8("tensor"), 0.03), (FP8("group", (128, 128)), 0.03), (Int8(), 0.01),
    (Int8("token"), 0.01), (Grouped(8, 0), 0.01), (Grouped(4, 32), 0.12), (Grouped(4, 64, "uint8"), 0.12),
    (Grouped(4, 128, "uint8", "bfloat16"), 0.13), (Grouped(3, 32), 0.25), (Grouped(2, 32, "uint8"), 0.5),
    (Grouped(4, 32, ordered=True), 0.12), (MXFP4(), 0.15), (MXFP8(), 0.04), (NVFP4(), 0.12), (NVFP4(divides=True), 0.12),
    (Table4("nf4"), 0.12), (Table4("fp4"), 0.16), (GGUF("q8_0"), 0.01), (GGUF("q4_0"), 0.12), (GGUF("q5_1"), 0.05),
    (GGUF("q4_1"), 0.12), (GGUF("q5_0"), 0.06),
]
IDS = [f"{scheme}" for scheme, _ in SCHEMES]


@pytest.mark.parametrize(("scheme", "error"), SCHEMES, ids=IDS)
@pytest.mark.parametrize("shape", [(24, 192), (200, 480), (130, 256)])
def test_a_matrix_survives(scheme: Scheme, error: float, shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.05
    parts = scheme.encode(matrix)
    listed = scheme.parts(*shape, "float32")
    assert {name: (tuple(part.shape), str(part.dtype)) for name, part in parts.items()} == {
        part.suffix: (part.shape, f"torch.{part.dtype}") for part in listed}
    found = scheme.decode(parts, torch.float32)
    assert found.shape == shape and (found - matrix).norm() / matrix.norm() < error
    assert sum(part.nbytes for part in listed) == sum(part.nbytes for part in parts.values()) < matrix.nbytes


@pytest.mark.parametrize(("scheme", "error"), SCHEMES, ids=IDS)
def test_products_gathers_and_gates_decode_by_tiles(scheme: Scheme, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as with the decoded matrix, whatever the tile."""
    monkeypatch.setattr("penstock.quant.scheme._TILE", 128 * 256)
    facts = detect("cpu")
    kernels = registry.bind(facts, torch.float32, {"*": "reference"})
    generator = torch.Generator().manual_seed(2)
    matrix, x = torch.randn(300, 256, generator=generator), torch.randn(5, 256, generator=generator)
    parts, bias = scheme.encode(matrix), torch.randn(300, generator=generator)
    weight = pack(scheme, (300, 256), parts, torch.float32, kernels)
    decoded = scheme.decode(parts, torch.float32)
    expected = scheme.inputs(x, parts) @ decoded.t() + bias
    torch.testing.assert_close(weight.ops.apply(x, weight, bias), expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(weight.ops.gated(x, weight, bias, "silu"), kernels.gated(expected, "silu"), atol=1e-4, rtol=1e-5)
    ids = torch.tensor([299, 0, 7, 128])
    assert torch.equal(weight.ops.gather(ids, weight), decoded[ids])
    assert weight.nbytes == sum(part.nbytes for part in parts.values())


def test_activations_are_rounded_once_a_token() -> None:
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(3)) * torch.tensor([[1.0], [10.0], [0.0], [1e-3]])
    for scheme, error in ((FP8("token"), 0.03), (Int8("token"), 0.01), (FP8("group", (128, 128)), 0.03)):
        found = scheme.inputs(x, {})
        assert not torch.equal(found, x) and torch.equal(found[2], x[2])
        assert ((found - x).norm(dim=1) <= error * x.norm(dim=1)).all()
        assert torch.equal(scheme.inputs(x[1:2], {}), found[1:2]), "a row does not depend on the others"
    assert FP8().inputs(x, {}) is x and Int8().inputs(x, {}) is x
    scale = torch.tensor([0.5])
    assert torch.equal(Int8("tensor").inputs(torch.tensor([[0.6, 80.0, -80.0]]), {"input_scale": scale}),
                       torch.tensor([[0.5, 63.5, -64.0]]))


@pytest.mark.parametrize("width", [2, 3, 4, 8])
def test_codes_lie_lowest_bits_first(width: int) -> None:
    codes = torch.randint(0, 1 << width, (5, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(width))
    packed = bits.pack(codes, width)
    assert packed.shape == (5, 48 * width // 8) and torch.equal(bits.unpack(packed, width), codes)
    whole = int.from_bytes(bytes(packed[2].tolist()), "little")
    assert [whole >> width * i & (1 << width) - 1 for i in range(48)] == codes[2].tolist()


def test_powers_of_two() -> None:
    found = bits.power_of_two(torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8))
    assert found[:4].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127] and found[4].isnan()


def test_rounding_to_a_table_takes_the_even_code_of_two() -> None:
    x = torch.tensor([0.25, 0.75, 1.25, 2.5, 5.0, 7.0, -0.25, -0.75, -9.0, 0.26, 0.0])
    assert [bits.FP4[code] for code in bits.nearest(x, bits.FP4).tolist()] == [0, 1, 1, 2, 4, 6, 0, -1, -6, 0.5, 0]


def test_act_order_sorts_columns() -> None:
    scheme = Grouped(4, 32, ordered=True)
    matrix = torch.randn(8, 64)
    parts = scheme.encode(matrix)
    order = torch.randperm(64)
    moved = scheme.decode({**parts, "order": order.int()}, torch.float32)
    assert torch.equal(moved[:, order], scheme.decode(parts, torch.float32))
