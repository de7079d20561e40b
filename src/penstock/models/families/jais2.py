"""Jais 2: Llama with LayerNorms, biases and squared ReLUs."""

from penstock.models.family import Config, ModelSpec, parts, rope, rules

ARCHITECTURES = ("Jais2ForCausalLM",)
MODEL_TYPES = ("jais2",)
DEFAULTS = {"hidden_act": "relu2", "max_position_embeddings": 8192}
RULES = rules.LAYER_NORM_LLAMA


def spec(config: Config) -> ModelSpec:
    norm, bias = parts.layer_norm(config), config.flag("attention_bias", True)
    attention = parts.attention(config, rope=rope(config, parts.head_size(config), theta=500000.0), bias=bias)
    mlp = parts.plain_mlp(config, bias=config.flag("mlp_bias", True))
    return parts.decoder(config, [parts.pre_norm_block(attention, mlp, norm)] * config.integer("num_hidden_layers"), norm)
