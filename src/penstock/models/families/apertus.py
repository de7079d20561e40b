"""Apertus: queries and keys normed, a plain feed-forward layer with a learned activation (xIELU)."""

from penstock.models.family import Config, ModelSpec, QueryKeyNorm, Rule, flat, parts, rope, rules

ARCHITECTURES = ("ApertusForCausalLM",)
MODEL_TYPES = ("apertus",)
DEFAULTS = {"hidden_act": "xielu", "max_position_embeddings": 65536, "rms_norm_eps": 1e-5}
RULES = (
    *rules.EMBEDDING,
    *rules.ATTENTION,
    *rules.MLP,
    Rule("model.layers.#.attention_layernorm.weight", "blocks.#.attention.pre.weight"),
    Rule("model.layers.#.feedforward_layernorm.weight", "blocks.#.mlp.pre.weight"),
    Rule("model.layers.#.mlp.act_fn.*", "blocks.#.mlp.act.*", flat),
)


def spec(config: Config) -> ModelSpec:
    norm = parts.rms_norm(config)
    attention = parts.attention(config, rope=rope(config, parts.head_size(config), theta=12000000.0), norm=QueryKeyNorm(norm),
                                bias=config.flag("attention_bias", False))
    block = parts.pre_norm_block(attention, parts.plain_mlp(config), norm)
    return parts.decoder(config, [block] * config.integer("num_hidden_layers"), norm)
