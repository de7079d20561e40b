"""Llama 1 to 3.3, and the many models of the same shape."""

from penstock.models.family import Config, ModelSpec, parts, rope, rules

ARCHITECTURES = ("LlamaForCausalLM",)
MODEL_TYPES = ("llama",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 2048}
RULES = rules.LLAMA


def spec(config: Config) -> ModelSpec:
    norm, bias = parts.rms_norm(config), config.flag("attention_bias", False)
    attention = parts.attention(config, rope=rope(config, parts.head_size(config)), bias=bias)
    mlp = parts.gated_mlp(config, bias=config.flag("mlp_bias", False))
    return parts.decoder(config, [parts.pre_norm_block(attention, mlp, norm)] * config.integer("num_hidden_layers"), norm)
