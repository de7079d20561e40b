"""Gemma 1: embeddings scaled by the width's root, norms around 1."""

from penstock.models.family import Config, EmbeddingSpec, HeadSpec, ModelSpec, parts, rope, rules

ARCHITECTURES = ("GemmaForCausalLM",)
MODEL_TYPES = ("gemma",)
DEFAULTS = {"hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "head_dim": 256, "num_key_value_heads": 16}
RULES = rules.LLAMA


def spec(config: Config) -> ModelSpec:
    config.absent("use_bidirectional_attention")
    norm = parts.rms_norm(config, offset=1.0)
    attention = parts.attention(config, rope=rope(config, parts.head_size(config)), bias=config.flag("attention_bias", False))
    # Of the early configs "gelu" means the approximation, too.
    named = "hidden_activation" if "hidden_activation" in config.values else "hidden_act"
    if config.values[named] == "gelu":
        config = config.changed(**{named: "gelu_pytorch_tanh"})
    mlp = parts.gated_mlp(config, activation=named)
    return parts.uniform(config, attention, mlp, norm,
                         head=HeadSpec(config.flag("tie_word_embeddings", True)),
                         embedding=EmbeddingSpec(config.integer("hidden_size") ** 0.5, True))
