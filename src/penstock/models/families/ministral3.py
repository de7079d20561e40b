"""Ministral 3: Mistral whose queries grow with the logarithm of their position, far behind the trained length."""

import dataclasses

from penstock.models.family import Config, ModelSpec, parts, rope, rules

ARCHITECTURES = ("Ministral3ForCausalLM",)
MODEL_TYPES = ("ministral3",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 262144, "num_key_value_heads": 8, "head_dim": 128,
            "rms_norm_eps": 1e-5}
RULES = rules.LLAMA


def spec(config: Config) -> ModelSpec:
    norm, given = parts.rms_norm(config), dict(config.values.get("rope_parameters") or {})
    beta, original = given.pop("llama_4_scaling_beta", None), given.get("original_max_position_embeddings", 16384)
    turn = rope(config.changed(rope_parameters=given), parts.head_size(config), theta=1000000.0)
    attention = parts.attention(config, rope=turn, window=config.nullable_integer("sliding_window", 0))
    if beta:
        attention = dataclasses.replace(attention, growth=(float(beta), int(original)))
    return parts.layered(config, attention, parts.gated_mlp(config), norm)
