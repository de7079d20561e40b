"""Seed-OSS: Llama with biases on queries, keys and values."""

from penstock.models.family import Config, ModelSpec, parts, rope, rules

ARCHITECTURES = ("SeedOssForCausalLM",)
MODEL_TYPES = ("seed_oss",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128}
RULES = rules.LLAMA


def spec(config: Config) -> ModelSpec:
    norm = parts.rms_norm(config)
    attention = parts.attention(config, rope=rope(config, parts.head_size(config)), bias=config.flag("attention_bias", True),
                                output_bias=config.flag("attention_out_bias", False))
    mlp = parts.gated_mlp(config, bias=config.flag("mlp_bias", False))
    return parts.decoder(config, [parts.pre_norm_block(attention, mlp, norm)] * config.integer("num_hidden_layers"), norm)
