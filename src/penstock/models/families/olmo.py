"""OLMo 1: LayerNorms without weights, queries, keys and values perhaps clamped."""

from __future__ import annotations

import dataclasses

from penstock.layers.norm import LayerNormSpec
from penstock.layers.spec import ModelSpec
from penstock.models import parts, rules
from penstock.models.config import Config, rope

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
