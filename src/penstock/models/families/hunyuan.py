"""Hunyuan 1 (dense): queries and keys are normed after the rotation."""

from penstock.models.family import Config, ModelSpec, QueryKeyNorm, Rule, parts, rope, rules

ARCHITECTURES = ("HunYuanDenseV1ForCausalLM",)
MODEL_TYPES = ("hunyuan_v1_dense",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
RULES = (
    Rule("model.layers.#.self_attn.query_layernorm.weight", "blocks.#.attention.q_norm.weight"),
    Rule("model.layers.#.self_attn.key_layernorm.weight", "blocks.#.attention.k_norm.weight"),
    *rules.LLAMA,
)


def spec(config: Config) -> ModelSpec:
    norm, bias = parts.rms_norm(config), config.flag("attention_bias", False)
    attention = parts.attention(config, rope=rope(config, parts.head_size(config)), bias=bias,
                                norm=QueryKeyNorm(norm, after=True))
    block = parts.pre_norm_block(attention, parts.gated_mlp(config), norm)
    return parts.decoder(config, [block] * config.integer("num_hidden_layers"), norm)
