"""Persimmon: queries, keys and values merged by head, normed heads, squared ReLUs."""

from penstock.models.family import Config, ModelSpec, QueryKeyNorm, Rule, interleaved, parts, rope, rules

ARCHITECTURES = ("PersimmonForCausalLM",)
MODEL_TYPES = ("persimmon",)
DEFAULTS = {"hidden_act": "relu2", "max_position_embeddings": 16384}
RULES = (
    Rule("model.layers.#.self_attn.query_key_value.*", "blocks.#.attention.qkv.*", interleaved),
    Rule("model.layers.#.self_attn.dense.*", "blocks.#.attention.o.*"),
    Rule("model.layers.#.self_attn.q_layernorm.*", "blocks.#.attention.q_norm.*"),
    Rule("model.layers.#.self_attn.k_layernorm.*", "blocks.#.attention.k_norm.*"),
    Rule("model.layers.#.mlp.dense_h_to_4h.*", "blocks.#.mlp.up.*"),
    Rule("model.layers.#.mlp.dense_4h_to_h.*", "blocks.#.mlp.down.*"),
    Rule("model.final_layernorm.*", "norm.*"),
    *rules.LAYER_NORM_LLAMA,
)


def spec(config: Config) -> ModelSpec:
    norm = parts.layer_norm(config)
    attention = parts.attention(config, rope=rope(config, parts.head_size(config), theta=25000.0, fraction=0.5), bias=True,
                                norm=QueryKeyNorm(norm) if config.flag("qk_layernorm", True) else None)
    return parts.uniform(config, attention, parts.plain_mlp(config, bias=True), norm)
