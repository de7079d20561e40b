"""Baichuan 1 and 2: Llama with queries, keys and values merged; those of 40 heads (13B) have ALiBi instead of rotation."""

import dataclasses

import torch

from penstock.models.family import Config, ModelSpec, Rule, parts, rope, rules

ARCHITECTURES = ("BaichuanForCausalLM", "BaiChuanForCausalLM")
MODEL_TYPES = ("baichuan",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 4096}


def _normalised(tensor: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """Baichuan 2 divides each row of its head by the row's length."""
    return torch.nn.functional.normalize(tensor.float()).to(tensor.dtype) if spec.vocab_size == 125696 else tensor


RULES = (
    Rule("lm_head.weight", "head.weight", _normalised),
    Rule("model.layers.#.self_attn.W_pack.weight", "blocks.#.attention.qkv.weight"),
    *rules.LLAMA,
)


def spec(config: Config) -> ModelSpec:
    norm, heads = parts.rms_norm(config), config.integer("num_attention_heads")
    tall = heads == 40
    attention = parts.attention(config, rope=None if tall else rope(config, parts.head_size(config)))
    attention = dataclasses.replace(attention, slopes=parts.slopes(heads) if tall else ())
    length = config.integer("model_max_length" if "model_max_length" in config.values else "max_position_embeddings")
    return parts.layered(config, attention, parts.gated_mlp(config), norm, max_positions=length)
