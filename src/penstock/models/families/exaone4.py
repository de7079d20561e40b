"""EXAONE 4: norms after each branch, normed queries and keys, no rotation in the layers that do not slide."""

from penstock.models.families import olmo2
from penstock.models.family import BlockSpec, BranchSpec, Config, ModelSpec, QueryKeyNorm, parts, rope

ARCHITECTURES = ("Exaone4ForCausalLM",)
MODEL_TYPES = ("exaone4",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "num_key_value_heads": 32}
RULES = olmo2.RULES


def _slides(config: Config, layers: int) -> list[bool]:
    """By layer_types, or a pattern: "LLLG", or every n-th layer is global."""
    pattern = config.values.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):
        found = [pattern[i % len(pattern)] == "L" and i < layers - 1 for i in range(layers)]
    else:
        found = [bool(pattern) and (i + 1) % pattern != 0 for i in range(layers)]
    return [window > 0 for window in config.windows(layers, lambda layer: found[layer], 1)]


def spec(config: Config) -> ModelSpec:
    norm, width = parts.rms_norm(config), config.nullable_integer("sliding_window", 4096)
    turn, mlp, blocks = rope(config, parts.head_size(config)), BranchSpec(parts.gated_mlp(config), post=norm), []
    for slides in _slides(config, config.integer("num_hidden_layers")):
        window = width if slides else 0
        attention = parts.attention(config, rope=turn if window or not width else None, window=window, norm=QueryKeyNorm(norm))
        blocks.append(BlockSpec(((BranchSpec(attention, post=norm),), (mlp,))))
    return parts.decoder(config, blocks, norm)
