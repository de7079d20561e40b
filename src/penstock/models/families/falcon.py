"""Falcon, all generations: one or several groups of heads, ALiBi or rotation, branches side by side or not."""

import torch

from penstock.models.family import Config, ModelSpec, Rule, by_group, parts, rope

ARCHITECTURES = ("FalconForCausalLM", "RWForCausalLM")
MODEL_TYPES = ("falcon", "RefinedWeb", "RefinedWebModel")
DEFAULTS = {"activation": "gelu", "max_position_embeddings": 2048, "tie_word_embeddings": True}
RULES = (
    Rule("[transformer.]word_embeddings.weight", "embedding.weight"),
    *Rule.named("[transformer.]h.#.", {"self_attention.query_key_value.*": ("attention.qkv.*", by_group),
        "self_attention.dense.*": "attention.o.*", "input_layernorm.*": "attention.pre.*", "ln_attn.*": "attention.pre.*",
        "post_attention_layernorm.*": "mlp.pre.*", "ln_mlp.*": "mlp.pre.*", "mlp.dense_h_to_4h.*": "mlp.up.*",
        "mlp.dense_4h_to_h.*": "mlp.down.*"}),
    Rule("[transformer.]ln_f.*", "norm.*"),
    Rule("lm_head.weight", "head.weight"),
)


def _slopes(heads: int, size: int) -> tuple[float, ...]:
    """Falcon rounds them to bfloat16, and scales them together with the scores."""
    return tuple((torch.tensor(parts.slopes(heads)).bfloat16().double() * size**-0.5).tolist())


def _kv_heads(config: Config, heads: int, new: bool) -> int:
    if new:
        return config.integer("num_kv_heads", heads)
    return 1 if config.flag("multi_query", True) else heads


def spec(config: Config) -> ModelSpec:
    heads, size = config.integer("num_attention_heads"), parts.head_size(config)
    new, bias = config.flag("new_decoder_architecture", False), config.flag("bias", False)
    alibi = config.flag("alibi", False)
    norm = parts.layer_norm(config, "layer_norm_epsilon")
    attention = parts.attention(config.changed(num_key_value_heads=_kv_heads(config, heads, new)), bias=bias,
                                rope=None if alibi else rope(config, size), slopes=_slopes(heads, size) if alibi else ())
    mlp = parts.plain_mlp(config, activation="activation", inner="ffn_hidden_size", multiple=4, bias=bias)
    beside = new and config.integer("num_ln_in_parallel_attn", 2) == 2
    return parts.layered(config, attention, mlp, norm, beside=beside,
                         same=not beside and (new or config.flag("parallel_attn", True)))
