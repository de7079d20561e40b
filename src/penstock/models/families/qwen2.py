"""Qwen2, Qwen2.5 and MiMo: biases on queries, keys and values, and perhaps sliding windows in the upper layers."""

from penstock.models.family import Config, ModelSpec, Rule, parts, rope, rules

ARCHITECTURES = ("Qwen2ForCausalLM", "MiMoForCausalLM")
MODEL_TYPES = ("qwen2", "mimo")
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 32768}
RULES = (Rule("model.mtp_layers.**", None), *rules.LLAMA)


def upper_windows(config: Config) -> list[int]:
    """Each layer's window: from `max_window_layers` on, if `use_sliding_window`."""
    slides, first = config.flag("use_sliding_window", False), config.integer("max_window_layers", 28, least=0)
    width = config.nullable_integer("sliding_window", 4096) if slides else 0
    return config.windows(config.integer("num_hidden_layers"), lambda layer: layer >= first, width)


def spec(config: Config) -> ModelSpec:
    config.absent("dual_chunk_attention_config")
    norm, mlp = parts.rms_norm(config), parts.gated_mlp(config)
    turn = rope(config, parts.head_size(config))
    blocks = []
    for window in upper_windows(config):
        attention = parts.attention(config, rope=turn, window=window, bias=True, output_bias=False)
        blocks.append(parts.pre_norm_block(attention, mlp, norm))
    return parts.decoder(config, blocks, norm)
