"""Codecs of the KV cache: their definition, what CPU kernels write and read, and the formulas of other programs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from penstock.ops.codec import CODECS, Codec, Scales, hadamard
from penstock.ops.table import Implementation
from tests.ops.kernels import close, every, random, reference, usable
from tests.ops.test_attention import Case

SEGMENTS = ([(200, 70), (130, 1), (1, 1), (600, 3)], [(70, 33), (1100, 1)])


def cached(codec: Codec, pages: int, kv: int, page: int, size: int,
           device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor, Scales]:
    """An empty cache of codes: its bytes are those of numbers that must not be read."""
    found = {}
    for field in codec.fields(kv, size):
        kind = getattr(torch, field.dtype)
        whole = torch.full((pages, 3, *field.shape[:-1], page, field.shape[-1]), 127, dtype=torch.uint8)
        if kind.itemsize > 1:
            whole = torch.full(whole.shape, float("nan"), dtype=kind)
        found[field.name] = whole.to(device).view(kind)[:, 1]
    return found["k"], found["v"], Scales(codec, found.get("k_scale"), found.get("v_scale"))


def written(case: Case, codec: Codec, write: Any) -> tuple[torch.Tensor, torch.Tensor, Scales, torch.Tensor, torch.Tensor]:
    """The case's cache encoded by `write`, and the plain keys and values that are left of it: [pages, KV, page, D] float32."""
    pages, kv, page, size = case.k.shape
    k, v, scales = cached(codec, pages, kv, page, size, case.k.device)
    slots = torch.arange(pages * page, device=case.k.device)
    write(*(x.transpose(1, 2).flatten(0, 1) for x in (case.k, case.v)), slots, k, v, scales)
    plain = [coding.decode(x, beside, fixed) for x, coding, beside, fixed in (
        (k, codec.key, scales.k, codec.scales[0]), (v, codec.value, scales.v, codec.scales[1]))]
    return k, v, scales, *plain


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("implementation", [*every("attention")])
def test_attention_reads_what_was_written(implementation: Implementation, name: str) -> None:
    """Of every codec: the kernel's bytes are the reference's, and attention over them is attention over decoded numbers."""
    attention = usable(implementation, torch.float32)
    write = next(one.values[0] for one in every("cache_write") if one.id == implementation.name)
    write = usable(write, torch.float32) if implementation.name.startswith("cpu") else pytest.skip("see test_codec_triton.py")
    codec = Codec(name, CODECS[name].key, CODECS[name].value, (0.05, 0.03))
    for segments, heads, kv, size, window in zip(SEGMENTS, (8, 6), (2, 3), (64, 32), (0, 40), strict=True):
        case = Case(list(segments), heads, kv, size, window=window)
        case.build()
        k, v, scales, keys, values = written(case, codec, write)
        wanted = written(case, codec, reference("cache_write"))
        for one, other in ((k, wanted[0]), (v, wanted[1]), (scales.k, wanted[2].k), (scales.v, wanted[2].v)):
            assert one is None or torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)) or (
                # Sums of squares run in another order: a length may differ in its last place.
                codec.key.rule == "norm" and torch.allclose(one.float(), other.float(), rtol=1e-3))
        case.k, case.v = keys, values
        exact = case.run(reference("attention"))
        for call in (attention, reference("attention")):
            found = call.apply(case.q, k, v, case.table, case.query_start, case.context, size**-0.5, window, scales=scales)
            close(found, exact, 0.1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_models_of_fewer_bits(dtype: torch.dtype) -> None:
    """Keys and values in 16 bits are encoded as the same numbers in 32 bits."""
    for name in ("fp8", "int4", "q8_0"):
        codec, x = CODECS[name], random(40, 2, 64, dtype=dtype)
        for one in every("cache_write"):
            if one.id.startswith("cpu"):
                k, v, scales = cached(codec, 3, 2, 16, 64)
                usable(one.values[0], dtype)(x, x, torch.arange(40), k, v, scales)
                codes, numbers = codec.key.encode(x)
                assert torch.equal(k.transpose(1, 2).flatten(0, 1)[:40].contiguous().view(torch.uint8), codes.view(torch.uint8))
                if numbers is not None:
                    assert torch.equal(scales.k.transpose(1, 2).flatten(0, 1)[:40], numbers)


@pytest.mark.parametrize("implementation", [one for one in every("cache_write") if one.id.startswith("cpu")])
def test_padding_writes_nothing_and_extremes_saturate(implementation: Implementation) -> None:
    write = usable(implementation, torch.float32)
    x = torch.tensor([[1e6, -1e6, 0.0, -0.0, 1e-9, 447.9, 3.0, 449.0] * 4])[None].repeat(3, 1, 1)
    for name, codec in CODECS.items():
        k, v, scales = cached(codec, 1, 1, 4, 32)
        before = k.clone().view(torch.uint8)
        write(x, x, torch.tensor([2, -1, 0]), k, v, scales)
        assert torch.equal(k.view(torch.uint8)[:, :, [1, 3]], before[:, :, [1, 3]]), name
        found = codec.key.decode(k[0, 0, [2, 0]].contiguous(), None if scales.k is None else scales.k[0, 0, [2, 0]])
        expected = codec.key.decode(*codec.key.encode(x[[0, 2], 0]))
        assert torch.equal(found.isfinite(), expected.isfinite()), name
        if name.startswith("fp8"):
            assert torch.equal(found, expected) and found.isfinite().all()


def test_the_formulas_of_gguf() -> None:
    gguf = pytest.importorskip("gguf")
    x = random(50, 96, seed=7) * (random(50, 1, seed=1) * 30)
    for name, kind in (("q8_0", gguf.GGMLQuantizationType.Q8_0), ("q4_0", gguf.GGMLQuantizationType.Q4_0)):
        coding = CODECS[name].key
        wanted = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(x.numpy(), kind), kind))
        assert torch.equal(coding.decode(*coding.encode(x)), wanted)


def test_float8_is_torchs() -> None:
    """Every number of both types, those between them, and beyond."""
    codes = torch.arange(256, dtype=torch.uint8)
    for name, kind in (("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
        numbers = codes.view(kind).float()
        numbers = numbers[numbers.isfinite()].sort().values
        between = torch.cat((numbers, (numbers[1:] + numbers[:-1]) / 2, torch.nextafter(numbers, torch.tensor(9e9))))
        x = torch.cat((between, torch.tensor([1e9, -1e9]))).clamp(-1e9, 1e9)
        x = x[:len(x) // 16 * 16].view(-1, 1, 16)
        for one in every("cache_write"):
            if one.id.startswith("cpu"):
                k, v, scales = cached(CODECS[name], 1, 1, len(x), 16)
                usable(one.values[0], torch.float32)(x, x, torch.arange(len(x)), k, v, scales)
                most = CODECS[name].key.peak
                assert torch.equal(k[0, 0].float(), x[:, 0].clamp(-most, most).to(kind).float()), one.id


def test_rotations_leave_scores() -> None:
    for size in (1, 2, 32, 64, 128, 256):
        one, other = hadamard(size)
        q, k = random(5, size, seed=1), random(7, size, seed=2)
        close((q @ one) @ (k @ other).T, (q @ k.T).double(), 10)
        assert torch.equal(one, one.T) and {math.frexp(abs(x))[0] for x in one.flatten().tolist()} == {0.5}


def test_shapes_that_do_not_fit_are_named() -> None:
    assert "not a power of two" in (CODECS["turbo4"].key.misfit(80) or "")
    assert "32 elements together" in (CODECS["q8_0"].key.misfit(80) or "")
    assert CODECS["int4"].key.misfit(80) is None and "2 elements" in (CODECS["int4"].key.misfit(7) or "")
