"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, and a shared one whose result is gated."""

from penstock.models.family import Config, ModelSpec, Routing, parts, rope, rules

ARCHITECTURES = ("Qwen2MoeForCausalLM",)
MODEL_TYPES = ("qwen2_moe",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 32768, "num_experts": 60, "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
RULES = (*rules.EXPERTS, *rules.LLAMA)


def spec(config: Config) -> ModelSpec:
    norm, mlp, layers = parts.rms_norm(config), parts.gated_mlp(config), config.integer("num_hidden_layers")
    routing = Routing(parts.expert_count(config), config.integer("num_experts_per_tok"),
                      normalise=config.flag("norm_topk_prob", False))
    mixture = parts.experts(config, routing, shared_inner=config.integer("shared_expert_intermediate_size"), shared_gate=True)
    turn, first = rope(config, parts.head_size(config)), config.integer("max_window_layers", 28, least=0)
    width = config.nullable_integer("sliding_window", 4096) if config.flag("use_sliding_window", False) else 0
    blocks = []
    windows = config.windows(layers, lambda layer: layer < first and layer % 2 == 0, width)
    for window, sparse in zip(windows, parts.sparse_layers(config), strict=True):
        attention = parts.attention(config, rope=turn, window=window, bias=config.flag("qkv_bias", True), output_bias=False)
        blocks.append(parts.pre_norm_block(attention, mixture if sparse else mlp, norm))
    return parts.decoder(config, blocks, norm)
