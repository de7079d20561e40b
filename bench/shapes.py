"""Model shapes that benchmarks run with random weights, so that no download is needed and speed alone is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fixed


def _llama(**sizes: Any) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "torch_dtype": "bfloat16", "tie_word_embeddings": False, "attention_bias": False,
            "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2, **sizes}


SHAPES: dict[str, dict[str, Any]] = {
    "llama15m": _llama(hidden_size=288, intermediate_size=768, num_hidden_layers=6, num_attention_heads=6,
                       num_key_value_heads=6, vocab_size=32000, max_position_embeddings=2048, tie_word_embeddings=True),
    "llama1b": _llama(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
                      num_key_value_heads=4, vocab_size=32000, max_position_embeddings=4096),
    **fixed.SHAPES,
}
"""config.json of each."""


def write(name: str, folder: Path) -> Path:
    """A model folder of that shape."""
    return fixed.write(SHAPES[name], folder / name)
