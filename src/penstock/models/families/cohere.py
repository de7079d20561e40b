"""Command R and Cohere 2 (Command A, Aya): parallel branches, LayerNorms without bias, interleaved rotation."""

from functools import partial

from penstock.models.families import llama
from penstock.models.family import Config, HeadSpec, ModelSpec, QueryKeyNorm, Rule, flat, parts, rules

ARCHITECTURES = ("CohereForCausalLM", "Cohere2ForCausalLM")
MODEL_TYPES = ("cohere", "cohere2")
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 8192}
RULES = (
    Rule("model.layers.#.self_attn.q_norm.weight", "blocks.#.attention.q_norm.weight", flat),
    Rule("model.layers.#.self_attn.k_norm.weight", "blocks.#.attention.k_norm.weight", flat),
    *rules.LLAMA,
)


_norm = partial(parts.layer_norm, bias=False)


def spec(config: Config) -> ModelSpec:
    """Cohere 2 rotates in sliding layers alone."""
    every = config.integer("sliding_window_pattern", 4)
    head = HeadSpec(config.flag("tie_word_embeddings", True), divisor=1.0 / config.number("logit_scale", 0.0625))
    norm = QueryKeyNorm(_norm(config), own=True) if config.flag("use_qk_norm", False) else None
    windows = llama.slides(lambda layer: (layer + 1) % every != 0) if config.named("Cohere2ForCausalLM", "cohere2") else None
    return llama.spec(config, norm=_norm, interleaved=True, attends={"norm": norm}, windows=windows, full={"rope": None},
                      same=True, head=head)
