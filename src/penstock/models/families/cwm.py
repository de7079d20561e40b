"""CWM: Llama 3 whose layers slide but every fourth."""

from penstock.models.family import Config, ModelSpec, parts, rope, rules

ARCHITECTURES = ("CwmForCausalLM",)
MODEL_TYPES = ("cwm",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128,
            "rms_norm_eps": 1e-5}
RULES = rules.LLAMA


def spec(config: Config) -> ModelSpec:
    norm, mlp = parts.rms_norm(config), parts.gated_mlp(config, bias=config.flag("mlp_bias", False))
    turn, blocks = rope(config, parts.head_size(config), theta=1000000.0), []
    for window in config.windows(config.integer("num_hidden_layers"), lambda layer: layer % 4 != 0,
                                 config.integer("sliding_window", 8192)):
        blocks.append(parts.pre_norm_block(parts.attention(config, rope=turn, window=window), mlp, norm))
    return parts.decoder(config, blocks, norm)
