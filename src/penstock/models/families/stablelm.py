"""StableLM: Llama with LayerNorms and partial rotation, perhaps with parallel branches and normed heads."""

from penstock.models.family import Config, ModelSpec, QueryKeyNorm, Rule, parts, rope, rules

ARCHITECTURES = ("StableLmForCausalLM", "StableLMEpochForCausalLM")
MODEL_TYPES = ("stablelm", "stablelm_epoch")
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 4096}
RULES = (
    Rule("model.layers.#.self_attn.q_layernorm.norms.*.weight", "blocks.#.attention.q_norm.*.weight"),
    Rule("model.layers.#.self_attn.k_layernorm.norms.*.weight", "blocks.#.attention.k_norm.*.weight"),
    *rules.LAYER_NORM_LLAMA,
)


def spec(config: Config) -> ModelSpec:
    norm = parts.layer_norm(config)
    normed = QueryKeyNorm(parts.layer_norm(config, bias=False), own=True) if config.flag("qk_layernorm", False) else None
    attention = parts.attention(config, rope=rope(config, parts.head_size(config), fraction=0.25), norm=normed,
                                bias=config.flag("use_qkv_bias", False), output_bias=False)
    return parts.layered(config, attention, parts.gated_mlp(config), norm, same=config.flag("use_parallel_residual", False))
