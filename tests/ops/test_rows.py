"""Norms, activations and the rotary write, each against its reference in float32 on the same inputs."""

from __future__ import annotations

import pytest
import torch

from penstock.ops.activation import ACTIVATIONS
from penstock.ops.table import Implementation
from tests.ops.kernels import DTYPES, close, every, random, reference, usable

WIDTHS = (1, 5, 16, 33, 64, 100, 288, 2048)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", every("rms_norm"))
def test_rms_norm(implementation: Implementation, dtype: torch.dtype) -> None:
    rms_norm = usable(implementation, dtype)
    for width in WIDTHS:
        for rows in (1, 3, 70):
            x = random(rows, width * 3, dtype=dtype, seed=rows)[:, width:2 * width]
            w = random(width, dtype=dtype, seed=1)
            for weight, offset in ((w, 0.0), (w, 1.0), (w.float(), 0.0)):
                close(rms_norm(x, weight, 1e-5, offset), reference("rms_norm")(x.float(), weight, 1e-5, offset), 1e-2)
    heads = random(7, 6 * 20, dtype=dtype)[:, 20:100].view(7, 4, 20)
    found = rms_norm(heads, w := random(20, dtype=dtype, seed=2), 1e-6)
    assert found.is_contiguous()
    close(found, reference("rms_norm")(heads.float(), w, 1e-6), 1e-2)
    one = random(20, dtype=dtype)
    close(rms_norm(one, w, 1e-6), reference("rms_norm")(one.float(), w, 1e-6), 1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", every("add_rms_norm"))
def test_add_rms_norm(implementation: Implementation, dtype: torch.dtype) -> None:
    add_rms_norm = usable(implementation, dtype)
    for width in WIDTHS:
        for rows in (1, 40):
            x, residual = random(rows, width, dtype=dtype, seed=1), random(rows, width, dtype=dtype, seed=2)
            w = random(width, dtype=dtype, seed=3)
            total = x + residual
            found, summed = add_rms_norm(x, residual, w, 1e-5, 0.0)
            assert torch.equal(summed, total)
            close(found, reference("rms_norm")(total.float(), w, 1e-5), 1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", every("layer_norm"))
def test_layer_norm(implementation: Implementation, dtype: torch.dtype) -> None:
    layer_norm = usable(implementation, dtype)
    for width in WIDTHS:
        x = random(9, width, dtype=dtype, seed=1) + 3
        w, b = random(width, dtype=dtype, seed=2), random(width, dtype=dtype, seed=3)
        for bias in (None, b):
            wanted = reference("layer_norm")(x.double(), w.double(), None if bias is None else bias.double(), 1e-5)
            close(layer_norm(x, w, bias, 1e-5), wanted, 1.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", sorted(ACTIVATIONS))
@pytest.mark.parametrize("implementation", every("gated"))
def test_gated(implementation: Implementation, kind: str, dtype: torch.dtype) -> None:
    gated = usable(implementation, dtype)
    for rows, width in ((1, 1), (3, 20), (70, 257), (2, 5000)):
        x = (random(rows, 2 * width + 3, dtype=dtype) * 4)[:, :2 * width]
        close(gated(x, kind), reference("gated")(x.double(), kind), 1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", sorted(ACTIVATIONS))
@pytest.mark.parametrize("implementation", every("activation"))
def test_activation(implementation: Implementation, kind: str, dtype: torch.dtype) -> None:
    activation = usable(implementation, dtype)
    # The square of 1e4 is beyond float16.
    far = 200.0 if kind == "relu2" and dtype == torch.float16 else 1e4
    sweep = torch.cat((torch.linspace(-12, 12, 4001), torch.tensor([-far, -100.0, -0.0, 0.0, 100.0, far]))).to(dtype)[None]
    close(activation(sweep, kind), reference("activation")(sweep.double(), kind), 1e-2)
    assert activation(torch.tensor([[float("nan"), 1.0]], dtype=dtype), kind).isnan().tolist() == [[True, False]]


ROPE_CASES = [(1, 4, 4, 8, 8, 1, False), (5, 6, 2, 20, 20, 8, True), (33, 8, 1, 80, 32, 16, True),
              (70, 3, 3, 64, 64, 32, False), (3, 2, 1, 7, 4, 4, True), (9, 4, 2, 256, 0, 16, True)]
"""Tokens, heads, KV heads, head size, rotated dimensions, page, with norms."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", every("rope_write"))
def test_rope_write(implementation: Implementation, dtype: torch.dtype) -> None:
    """q, k and v are views of one merged projection; the caches are slabs of one arena."""
    rope_write = usable(implementation, dtype)
    wanted_by = reference("rope_write")
    for tokens, heads, kv, size, rotated, page, norms in ROPE_CASES:
        merged = random(tokens, (heads + 2 * kv) * size, dtype=dtype, seed=tokens)
        q, k, v = (part.view(tokens, -1, size) for part in merged.split((heads * size, kv * size, kv * size), 1))
        pages = tokens // page + 4
        arena = random(pages, 3, 2, kv, page, size, dtype=dtype)
        angles = random(100, max(1, rotated // 2), seed=3) * 3
        tables = {"cos": angles.cos(), "sin": angles.sin()} if rotated else {}
        if norms:
            tables |= {"q_norm": random(size, dtype=dtype, seed=4), "k_norm": random(size, dtype=dtype, seed=5), "offset": 1.0}
        if heads % 2 and rotated:
            tables["interleaved"] = True
        positions = torch.randint(0, 100, (tokens,), generator=torch.Generator().manual_seed(1)).int()
        slots = torch.randperm(pages * page, generator=torch.Generator().manual_seed(2))[:tokens]
        expected = arena.clone()
        wanted = wanted_by(q, k, v, positions, slots, expected[:, 1, 0], expected[:, 1, 1], **tables)
        before = merged.clone()
        found = rope_write(q, k, v, positions, slots, arena[:, 1, 0], arena[:, 1, 1], **tables)
        assert torch.equal(merged, before)
        assert found.is_contiguous()
        # Two roundings, of the norm and of the rotation, whose f32 inputs may differ in the last place.
        close(found, wanted.float(), 1.0, factor=2)
        close(arena, expected.float(), 1.0, factor=2)
        untouched = torch.ones(pages * page, dtype=torch.bool)
        untouched[slots] = False
        flat = arena.permute(0, 4, 1, 2, 3, 5).flatten(0, 1)
        assert torch.equal(flat[untouched], expected.permute(0, 4, 1, 2, 3, 5).flatten(0, 1)[untouched])


@pytest.mark.parametrize("op", ["rms_norm", "gated"])
def test_rows_are_independent(op: str) -> None:
    for parameter in every(op):
        implementation = parameter.values[0]
        if implementation.name == "cpu-portable" or not implementation.name.startswith("cpu-"):
            continue
        call = usable(implementation, torch.bfloat16)
        x = random(65, 2048, dtype=torch.bfloat16)
        more = (random(2048, dtype=torch.bfloat16), 1e-5) if op == "rms_norm" else ("silu",)
        assert torch.equal(call(x, *more), torch.cat([call(x[i:i + 1], *more) for i in range(65)]))


@pytest.mark.parametrize("implementation", every("sample"))
@pytest.mark.parametrize(("vocab", "words"), [(61, 2), (512, 16), (5003, 157), (5003, 3)])
def test_mask(implementation: Implementation, vocab: int, words: int) -> None:
    """Masks of some lines, of rows wider than the vocabulary; a NaN survives, and tokens beyond the words are excluded."""
    mask = usable(implementation, torch.float32).mask
    bits = torch.randint(-2**31, 2**31, (3, words), generator=torch.Generator().manual_seed(vocab)).int()
    bits[1, :2] = torch.tensor([-1, 0])
    lines = torch.tensor([4, 0, 3], dtype=torch.int32)
    found = random(6, vocab + 8, seed=1)[:, :vocab]
    found[4, 7] = torch.nan
    wanted = found.clone()
    reference("sample").mask(wanted, bits, lines)
    assert wanted[4, 7].isnan() and wanted.isinf().any()
    mask(found, bits, lines)
    assert torch.equal(found.nan_to_num(99), wanted.nan_to_num(99))
