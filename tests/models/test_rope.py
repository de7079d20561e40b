"""Frequencies of every rope scaling at real sizes against transformers, and the properties of a table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penstock.layers.rope import RopeSpec
from penstock.models.config import Config, rope

SIZE = {"hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 32768}
FACTORS = torch.linspace(1, 30, 48).tolist()


@pytest.mark.parametrize(("given", "length"), [
    ({"rope_type": "linear", "factor": 8.0}, None),
    ({"rope_type": "dynamic", "factor": 4.0}, None),
    ({"rope_type": "dynamic", "factor": 4.0}, 100_000),
    ({"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
      "original_max_position_embeddings": 8192}, None),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, None),
    ({"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0,
      "mscale_all_dim": 0.7}, None),
    ({"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}, None),
    ({"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 4096}, None),
    ({"rope_type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS[::-1], "partial_rotary_factor": 0.75,
      "original_max_position_embeddings": 4096}, None),
    ({"rope_type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS[::-1], "partial_rotary_factor": 0.75,
      "original_max_position_embeddings": 4096}, 4097),
    ({"rope_type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS[::-1], "partial_rotary_factor": 0.75,
      "original_max_position_embeddings": 4096, "factor": 0.5}, None),
])
def test_frequencies(given: dict[str, Any], length: int | None) -> None:
    values = {"rope_theta": 500000.0, **given}
    theirs = transformers.LlamaConfig(**SIZE, rope_parameters=dict(values))
    expected, amplitude = ROPE_INIT_FUNCTIONS[given["rope_type"]](theirs, torch.device("cpu"), seq_len=length)
    spec = rope(Config({**SIZE, "rope_parameters": values}), 128)
    found = spec.scaling.frequencies(spec.theta, spec.dim, length or 4096)
    torch.testing.assert_close(found, expected, rtol=3e-6, atol=0)
    assert spec.scaling.amplitude() == pytest.approx(amplitude)


@pytest.mark.parametrize("dim", [2, 6, 7, 128])
def test_table(dim: int) -> None:
    cos, sin = RopeSpec(10000.0, dim).table(50, torch.device("cpu"))
    assert cos.shape == sin.shape == (50, (dim + 1) // 2)
    assert cos.dtype == sin.dtype == torch.float32
    assert torch.equal(cos[0], torch.ones((dim + 1) // 2))
    torch.testing.assert_close(cos**2 + sin**2, torch.ones_like(cos))
    torch.testing.assert_close(sin[:, 0], torch.arange(50).sin())
