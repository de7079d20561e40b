"""Qwen3-MoE (30B-A3B, 235B-A22B, Coder): Qwen3 whose feed-forward layers are mixtures, all or every n-th of them."""

from penstock.models.families.qwen2 import upper_windows
from penstock.models.family import Config, ModelSpec, QueryKeyNorm, Routing, parts, rope, rules

ARCHITECTURES = ("Qwen3MoeForCausalLM",)
MODEL_TYPES = ("qwen3_moe",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 32768, "num_key_value_heads": 4, "moe_intermediate_size": 768,
            "num_experts_per_tok": 8}
RULES = (*rules.EXPERTS, *rules.LLAMA)


def spec(config: Config) -> ModelSpec:
    norm, bias = parts.rms_norm(config), config.flag("attention_bias", False)
    routing = Routing(parts.expert_count(config), config.integer("num_experts_per_tok"),
                      normalise=config.flag("norm_topk_prob", False))
    mixture, mlp, turn = parts.experts(config, routing), parts.gated_mlp(config), rope(config, parts.head_size(config))
    blocks = []
    for window, sparse in zip(upper_windows(config), parts.sparse_layers(config), strict=True):
        attention = parts.attention(config, rope=turn, window=window, norm=QueryKeyNorm(norm), bias=bias)
        blocks.append(parts.pre_norm_block(attention, mixture if sparse else mlp, norm))
    return parts.decoder(config, blocks, norm)
