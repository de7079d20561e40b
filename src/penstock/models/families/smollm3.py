"""SmolLM3: Llama in which every fourth layer rotates nothing (NoPE)."""

from penstock.models.family import Config, ModelSpec, parts, rope, rules

ARCHITECTURES = ("SmolLM3ForCausalLM",)
MODEL_TYPES = ("smollm3",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 32768, "num_key_value_heads": 4, "tie_word_embeddings": True}
RULES = rules.LLAMA


def spec(config: Config) -> ModelSpec:
    norm, bias, layers = parts.rms_norm(config), config.flag("attention_bias", False), config.integer("num_hidden_layers")
    turn, every = rope(config, parts.head_size(config), theta=2000000.0), config.integer("no_rope_layer_interval", 4)
    # Despite its name, a 1 in no_rope_layers is a layer that rotates.
    turns = config.listing("no_rope_layers", layers, (0, 1).__contains__, "0 or 1")
    turns = [(i + 1) % every != 0 for i in range(layers)] if turns is None else turns
    width = config.nullable_integer("sliding_window", 0) if config.flag("use_sliding_window", False) else 0
    attentions = [parts.attention(config, rope=turn if turned else None, window=window, bias=bias) for turned, window
                  in zip(turns, config.windows(lambda layer: not turns[layer], width), strict=True)]
    return parts.layered(config, attentions, parts.gated_mlp(config, bias=config.flag("mlp_bias", False)), norm)
