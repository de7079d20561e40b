"""OLMo 3: OLMo 2 whose layers slide but every fourth; scaled rotations are those of full layers alone."""

import dataclasses

from penstock.models.families import olmo2
from penstock.models.family import BlockSpec, BranchSpec, Config, ModelSpec, NoScaling, QueryKeyNorm, parts, rope

ARCHITECTURES = ("Olmo3ForCausalLM",)
MODEL_TYPES = ("olmo3",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
RULES = olmo2.RULES


def spec(config: Config) -> ModelSpec:
    norm, bias, size = parts.rms_norm(config), config.flag("attention_bias", False), parts.head_size(config)
    full = rope(config, size, layer_type="full_attention", theta=500000.0)
    given = config.values.get("rope_parameters")
    nested = isinstance(given, dict) and "sliding_attention" in given
    near = dataclasses.replace(full, scaling=NoScaling())
    if nested:
        near = rope(config, size, layer_type="sliding_attention", theta=500000.0)
    mlp, blocks = BranchSpec(parts.gated_mlp(config), post=norm), []
    for window in config.windows(config.integer("num_hidden_layers"), lambda layer: (layer + 1) % 4 != 0,
                                 config.nullable_integer("sliding_window", 4096)):
        attention = parts.attention(config, rope=near if window else full, window=window, bias=bias,
                                    norm=QueryKeyNorm(norm, whole=True))
        blocks.append(BlockSpec(((BranchSpec(attention, post=norm),), (mlp,))))
    return parts.decoder(config, blocks, norm, max_positions=full.scaling.reach(config.integer("max_position_embeddings")))
