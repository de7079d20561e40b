"""Arcee (AFM): Llama with a plain feed-forward layer of squared ReLUs."""

from penstock.models.family import Config, ModelSpec, parts, rope, rules

ARCHITECTURES = ("ArceeForCausalLM",)
MODEL_TYPES = ("arcee",)
DEFAULTS = {"hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
RULES = rules.LLAMA


def spec(config: Config) -> ModelSpec:
    norm, bias = parts.rms_norm(config), config.flag("attention_bias", False)
    attention = parts.attention(config, rope=rope(config, parts.head_size(config)), bias=bias)
    mlp = parts.plain_mlp(config, bias=config.flag("mlp_bias", False))
    return parts.decoder(config, [parts.pre_norm_block(attention, mlp, norm)] * config.integer("num_hidden_layers"), norm)
