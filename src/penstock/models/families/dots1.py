"""dots.llm1: normed queries and keys, dense layers first, then experts by corrected sigmoids, and shared ones."""

from penstock.models.family import Config, ModelSpec, QueryKeyNorm, parts, rope, rules

ARCHITECTURES = ("Dots1ForCausalLM",)
MODEL_TYPES = ("dots1",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 2048, "first_k_dense_replace": 0, "n_shared_experts": 0,
            "moe_intermediate_size": 1408, "norm_topk_prob": False}
RULES = (*rules.EXPERTS, *rules.LLAMA)


def spec(config: Config) -> ModelSpec:
    norm, layers, first = parts.rms_norm(config), config.integer("num_hidden_layers"), config.integer("max_window_layers", 62)
    turn, bias = rope(config, parts.head_size(config)), config.flag("attention_bias", False)
    windows = config.windows(layers, lambda layer: layer >= first, config.nullable_integer("sliding_window", 4096))
    blocks = []
    for window, mlp in zip(windows, parts.dense_then_experts(config), strict=True):
        attention = parts.attention(config, rope=turn, window=window, norm=QueryKeyNorm(norm), bias=bias)
        blocks.append(parts.pre_norm_block(attention, mlp, norm))
    return parts.decoder(config, blocks, norm)
