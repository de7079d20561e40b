"""OLMo 2: norms after each branch, not before, and queries and keys normed over all heads together."""

from penstock.models.family import BlockSpec, BranchSpec, Config, ModelSpec, QueryKeyNorm, Rule, parts, rope, rules

ARCHITECTURES = ("Olmo2ForCausalLM",)
MODEL_TYPES = ("olmo2",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
RULES = (
    *rules.EMBEDDING,
    *rules.ATTENTION,
    *rules.MLP,
    Rule("model.layers.#.post_attention_layernorm.weight", "blocks.#.attention.post.weight"),
    Rule("model.layers.#.post_feedforward_layernorm.weight", "blocks.#.mlp.post.weight"),
)


def spec(config: Config) -> ModelSpec:
    norm, bias = parts.rms_norm(config), config.flag("attention_bias", False)
    turn = rope(config, parts.head_size(config))
    attention = parts.attention(config, rope=turn, norm=QueryKeyNorm(norm, whole=True), bias=bias)
    block = BlockSpec(((BranchSpec(attention, post=norm),), (BranchSpec(parts.gated_mlp(config), post=norm),)))
    return parts.decoder(config, [block] * config.integer("num_hidden_layers"), norm)
