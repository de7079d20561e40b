"""Phi-3 (mini, medium) and Phi-4 (mini and the 14B): Llama with merged matrices, partial rotation and LongRoPE."""

from penstock.models.family import Config, ModelSpec, Rule, parts, rope, rules

ARCHITECTURES = ("Phi3ForCausalLM",)
MODEL_TYPES = ("phi3",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5}
RULES = (
    *rules.EMBEDDING,
    *rules.PRE_NORMS,
    *Rule.named("model.layers.#.", {"self_attn.qkv_proj.weight": "attention.qkv.weight",
        "self_attn.o_proj.weight": "attention.o.weight", "self_attn.rotary_emb.inv_freq": None,
        "mlp.gate_up_proj.weight": "mlp.gate_up.weight", "mlp.down_proj.weight": "mlp.down.weight"}),
)


def spec(config: Config) -> ModelSpec:
    config.absent("attention_bias")
    norm, mlp = parts.rms_norm(config), parts.gated_mlp(config)
    turn = rope(config, parts.head_size(config), aliases={"su": "longrope", "yarn": "longrope"})
    attention = parts.attention(config, rope=turn, window=config.nullable_integer("sliding_window", 0))
    return parts.layered(config, attention, mlp, norm)
