"""OLMo 1: LayerNorms without weights, queries, keys and values perhaps clamped."""

import dataclasses

from penstock.models.family import Config, LayerNormSpec, ModelSpec, parts, rope, rules

ARCHITECTURES = ("OlmoForCausalLM",)
MODEL_TYPES = ("olmo",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 2048}
RULES = rules.LLAMA


def spec(config: Config) -> ModelSpec:
    norm, bias = LayerNormSpec(1e-5, bias=False, weight=False), config.flag("attention_bias", False)
    attention = parts.attention(config, rope=rope(config, parts.head_size(config)), bias=bias)
    attention = dataclasses.replace(attention, clip=config.nullable_number("clip_qkv", 0.0))
    block = parts.pre_norm_block(attention, parts.gated_mlp(config), norm)
    return parts.decoder(config, [block] * config.integer("num_hidden_layers"), norm)
