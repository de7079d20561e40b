"""Command R and Cohere 2 (Command A, Aya): parallel branches, LayerNorms without bias, interleaved rotation."""

from penstock.models import family
from penstock.models.family import BranchSpec, Config, HeadSpec, ModelSpec, QueryKeyNorm, Rule, flat, parts, rope, rules

ARCHITECTURES = ("CohereForCausalLM", "Cohere2ForCausalLM")
MODEL_TYPES = ("cohere", "cohere2")
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 8192}
RULES = (
    Rule("model.layers.#.self_attn.q_norm.weight", "blocks.#.attention.q_norm.weight", flat),
    Rule("model.layers.#.self_attn.k_norm.weight", "blocks.#.attention.k_norm.weight", flat),
    *rules.LLAMA,
)


def spec(config: Config) -> ModelSpec:
    norm, bias = parts.layer_norm(config, bias=False), config.flag("attention_bias", False)
    layers = config.integer("num_hidden_layers")
    turn = rope(config, parts.head_size(config), interleaved=True)
    normed = QueryKeyNorm(norm, own=True) if config.flag("use_qk_norm", False) else None
    second = config.named("Cohere2ForCausalLM", "cohere2")
    every = config.integer("sliding_window_pattern", 4)
    windows = config.windows(layers, lambda layer: (layer + 1) % every != 0, config.nullable_integer("sliding_window", 4096))
    blocks = []
    for window in windows if second else [0] * layers:
        # Cohere 2 rotates in sliding layers alone.
        attention = parts.attention(config, rope=turn if window or not second else None, window=window, norm=normed, bias=bias)
        blocks.append(family.BlockSpec(((BranchSpec(attention, norm), BranchSpec(parts.gated_mlp(config), same=True)),)))
    return parts.decoder(config, blocks, norm, head=HeadSpec(config.flag("tie_word_embeddings", True),
                                                             divisor=1.0 / config.number("logit_scale", 0.0625)))
