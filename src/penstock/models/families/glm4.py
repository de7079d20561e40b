"""GLM-4 (9B) and GLM-4-0414: interleaved partial rotation; 0414 has norms after its branches, too."""

from penstock.models.family import Config, ModelSpec, Rule, parts, rope, rules

ARCHITECTURES = ("GlmForCausalLM", "Glm4ForCausalLM")
MODEL_TYPES = ("glm", "glm4")
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128,
            "rms_norm_eps": 1.5625e-07}
RULES = (
    *Rule.named("model.layers.#.", {"mlp.gate_up_proj.*": "mlp.gate_up.*",
        "post_self_attn_layernorm.weight": "attention.post.weight", "post_mlp_layernorm.weight": "mlp.post.weight"}),
    *rules.LLAMA,
)


def spec(config: Config) -> ModelSpec:
    norm, bias = parts.rms_norm(config), config.flag("attention_bias", True)
    turn = rope(config, parts.head_size(config), fraction=0.5, interleaved=True)
    attention = parts.attention(config, rope=turn, bias=bias, output_bias=False)
    return parts.layered(config, attention, parts.gated_mlp(config), norm, post=config.named("Glm4ForCausalLM", "glm4"))
