"""Qwen3 (dense): each head's query and key are normed; no biases unless asked for."""

from penstock.models.families.qwen2 import upper_windows
from penstock.models.family import Config, ModelSpec, QueryKeyNorm, parts, rope, rules

ARCHITECTURES = ("Qwen3ForCausalLM",)
MODEL_TYPES = ("qwen3",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 32768, "head_dim": 128, "num_key_value_heads": 32}
RULES = rules.LLAMA


def spec(config: Config) -> ModelSpec:
    norm, mlp, bias = parts.rms_norm(config), parts.gated_mlp(config), config.flag("attention_bias", False)
    turn = rope(config, parts.head_size(config))
    blocks = []
    for window in upper_windows(config):
        attention = parts.attention(config, rope=turn, window=window, norm=QueryKeyNorm(norm), bias=bias)
        blocks.append(parts.pre_norm_block(attention, mlp, norm))
    return parts.decoder(config, blocks, norm)
