"""Mistral 7B and those of its shape: Llama with a sliding window in every layer, if at all."""

from penstock.models.family import Config, ModelSpec, parts, rope, rules

ARCHITECTURES = ("MistralForCausalLM",)
MODEL_TYPES = ("mistral",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 131072, "num_key_value_heads": 8}
RULES = rules.LLAMA


def spec(config: Config) -> ModelSpec:
    norm, mlp = parts.rms_norm(config), parts.gated_mlp(config)
    turn = rope(config, parts.head_size(config))
    width = config.nullable_integer("sliding_window", 4096)
    blocks = []
    for window in config.windows(config.integer("num_hidden_layers"), lambda _layer: True, width):
        blocks.append(parts.pre_norm_block(parts.attention(config, rope=turn, window=window), mlp, norm))
    return parts.decoder(config, blocks, norm)
