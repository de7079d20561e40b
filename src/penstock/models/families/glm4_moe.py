"""GLM-4.5, 4.6 and 4.7: dense layers first, then experts by corrected sigmoids in groups, and a shared one."""

from penstock.models.family import Config, ModelSpec, QueryKeyNorm, parts, rope, rules

ARCHITECTURES = ("Glm4MoeForCausalLM",)
MODEL_TYPES = ("glm4_moe",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "norm_topk_prob": True, "moe_intermediate_size": 1408}
RULES = (*rules.EXPERTS, *rules.LLAMA)


def spec(config: Config) -> ModelSpec:
    norm = parts.rms_norm(config)
    turn = rope(config, parts.head_size(config), fraction=0.5)
    attention = parts.attention(config, rope=turn, bias=config.flag("attention_bias", False), output_bias=False,
                                norm=QueryKeyNorm(norm) if config.flag("use_qk_norm", False) else None)
    blocks = [parts.pre_norm_block(attention, mlp, norm) for mlp in parts.dense_then_experts(config)]
    return parts.decoder(config, blocks, norm, beyond=parts.draft_layers(config))
