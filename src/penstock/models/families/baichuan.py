"""Baichuan 1 and 2: Llama with queries, keys and values merged; those of 40 heads (13B) have ALiBi instead of rotation."""

import torch

from penstock.models.families import llama
from penstock.models.family import Config, ModelSpec, Rule, parts, rules

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
    heads = config.integer("num_attention_heads")
    attends = {"rope": None, "slopes": parts.slopes(heads)} if heads == 40 else {}
    length = config.integer("model_max_length" if "model_max_length" in config.values else "max_position_embeddings")
    return llama.spec(config, attends=attends, max_positions=length)
