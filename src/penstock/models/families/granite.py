"""Granite 3 (dense): Llama with a multiplier on the embedding, the scores, every branch and the logits."""

from penstock.models.family import Config, EmbeddingSpec, HeadSpec, ModelSpec, parts, rope, rules

ARCHITECTURES = ("GraniteForCausalLM",)
MODEL_TYPES = ("granite",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 2048}
RULES = rules.LLAMA


def spec(config: Config) -> ModelSpec:
    norm, bias = parts.rms_norm(config), config.flag("attention_bias", False)
    attention = parts.attention(config, rope=rope(config, parts.head_size(config)), bias=bias,
                                scale=config.number("attention_multiplier", 1.0))
    mlp = parts.gated_mlp(config, bias=config.flag("mlp_bias", False))
    block = parts.pre_norm_block(attention, mlp, norm, scale=config.number("residual_multiplier", 1.0))
    return parts.decoder(config, [block] * config.integer("num_hidden_layers"), norm,
                         embedding=EmbeddingSpec(config.number("embedding_multiplier", 1.0)),
                         head=HeadSpec(config.flag("tie_word_embeddings", False), divisor=config.number("logits_scaling", 1.0)))
