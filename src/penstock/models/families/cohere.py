"""Command R and Cohere 2 (Command A, Aya): parallel branches, LayerNorms without bias, interleaved rotation."""

from dataclasses import replace

from penstock.models.family import Config, HeadSpec, ModelSpec, QueryKeyNorm, Rule, flat, parts, rope, rules

ARCHITECTURES = ("CohereForCausalLM", "Cohere2ForCausalLM")
MODEL_TYPES = ("cohere", "cohere2")
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 8192}
RULES = (
    Rule("model.layers.#.self_attn.q_norm.weight", "blocks.#.attention.q_norm.weight", flat),
    Rule("model.layers.#.self_attn.k_norm.weight", "blocks.#.attention.k_norm.weight", flat),
    *rules.LLAMA,
)


def spec(config: Config) -> ModelSpec:
    norm, every = parts.layer_norm(config, bias=False), config.integer("sliding_window_pattern", 4)
    attention = parts.attention(config, rope=rope(config, parts.head_size(config), interleaved=True),
                                bias=config.flag("attention_bias", False),
                                norm=QueryKeyNorm(norm, own=True) if config.flag("use_qk_norm", False) else None)
    windows = config.windows(lambda layer: (layer + 1) % every != 0, config.nullable_integer("sliding_window", 4096))
    # Cohere 2 rotates in sliding layers alone.
    second = parts.sliding(attention, windows, replace(attention, rope=None))
    head = HeadSpec(config.flag("tie_word_embeddings", True), divisor=1.0 / config.number("logit_scale", 0.0625))
    return parts.layered(config, second if config.named("Cohere2ForCausalLM", "cohere2") else attention,
                         parts.gated_mlp(config), norm, same=True, head=head)
