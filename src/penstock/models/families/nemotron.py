"""Nemotron (dense): LayerNorms around 1, squared ReLUs, partial rotation."""

from penstock.models.family import Config, ModelSpec, parts, rope, rules

ARCHITECTURES = ("NemotronForCausalLM",)
MODEL_TYPES = ("nemotron",)
DEFAULTS = {"hidden_act": "relu2", "max_position_embeddings": 4096}
RULES = rules.LAYER_NORM_LLAMA


def spec(config: Config) -> ModelSpec:
    norm, bias = parts.layer_norm(config, "norm_eps", offset=1.0), config.flag("attention_bias", False)
    attention = parts.attention(config, rope=rope(config, parts.head_size(config), fraction=0.5), bias=bias)
    mlp = parts.plain_mlp(config, bias=config.flag("mlp_bias", False))
    return parts.decoder(config, [parts.pre_norm_block(attention, mlp, norm)] * config.integer("num_hidden_layers"), norm)
