"""Every GGUF type is decoded to the bits that the `gguf` package gives, and encoded to its bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from penstock.checkpoint.gguf import SIZES
from penstock.core.errors import ModelError
from penstock.quant.gguf import ENCODERS, GGUF, KINDS


def random_blocks(kind: str, rows: int = 64) -> np.ndarray:
    """Random bytes, with the scales (float16, at whatever place) made finite: no exponent of all ones."""
    data = np.random.default_rng(7).integers(0, 256, (rows, 2 * KINDS[kind].nbytes), dtype=np.uint8)
    return data & 0xBF if kind != "iq1_m" else data & 0x3F


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_decode_as_the_package_decodes_them(kind: str) -> None:
    data = random_blocks(kind)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind.upper()])
    found = GGUF(kind).decode({"weight": torch.from_numpy(data)}, torch.float32)
    assert found.shape == (64, 2 * KINDS[kind].columns)
    finite = np.isfinite(expected)
    assert finite.mean() > 0.5 and np.array_equal(found.numpy()[finite], expected[finite])


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_are_the_packages(kind: str) -> None:
    known = gguf.GGMLQuantizationType[kind.upper()]
    sizes = KINDS[kind].columns, KINDS[kind].nbytes
    assert sizes == gguf.GGML_QUANT_SIZES[known] and SIZES[known.value] == (kind, *sizes)


@pytest.mark.parametrize("kind", [kind for kind in ENCODERS if not kind.endswith("_k")])
def test_blocks_are_encoded_as_the_package_encodes_them(kind: str) -> None:
    x = np.random.default_rng(3).standard_normal((32, 96)).astype(np.float32)
    x[1], x[2, :40] = 0, 1e-3
    expected = gguf.quants.quantize(x, gguf.GGMLQuantizationType[kind.upper()])
    assert np.array_equal(GGUF(kind).encode(torch.from_numpy(x))["weight"].numpy(), expected)


def test_what_cannot_be_stored_is_refused() -> None:
    with pytest.raises(ModelError, match="rows of 192 columns cannot be stored as q4_k, whose blocks have 256"):
        GGUF("q4_k").parts(4, 192, "float32")
    with pytest.raises(ModelError, match="cannot be quantized to iq2_xs here; possible GGUF types are q4_0"):
        GGUF("iq2_xs").encode(torch.zeros(4, 256))
