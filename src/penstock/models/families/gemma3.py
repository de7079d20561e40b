"""Gemma 3, text only: Gemma 2 with normed queries and keys instead of capped scores, and two rotations, one for the sliding
layers. Of a checkpoint with vision the text part is used; its other tensors are named below as not wanted."""

import dataclasses

from penstock.models import family
from penstock.models.families import gemma2
from penstock.models.family import BranchSpec, Config, HeadSpec, ModelSpec, QueryKeyNorm, RopeSpec, parts, rope, rules

ARCHITECTURES = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
MODEL_TYPES = ("gemma3_text", "gemma3")
DEFAULTS = {"hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072, "head_dim": 256,
            "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208, "hidden_size": 2304,
            "intermediate_size": 9216, "num_hidden_layers": 26}
RULES = (
    *(dataclasses.replace(rule, source=rule.source.replace("model.", "[language_model.]model.[language_model.]", 1))
      for rule in gemma2.RULES if rule.source.startswith("model.")),
    rules.Rule("[language_model.]lm_head.weight", "head.weight"),
    rules.Rule("[model.]vision_tower.**", None),
    rules.Rule("[model.]multi_modal_projector.**", None),
)


def _ropes(config: Config) -> dict[bool, RopeSpec]:
    """The rotation of sliding layers (True) and of the others (False): older configs have two bases, today's two entries."""
    size, limits = parts.head_size(config), config.values["max_position_embeddings"]
    given = config.values.get("rope_parameters")
    local = (given.get("sliding_attention") if isinstance(given, dict) else None) or {}
    local = {"rope_theta": config.number("rope_local_base_freq", 10000.0), **local}
    return {True: rope(Config({"rope_parameters": local, "max_position_embeddings": limits}), size),
            False: rope(config, size, layer_type="full_attention", theta=1000000.0)}


def spec(config: Config) -> ModelSpec:
    config.absent("use_bidirectional_attention", "attn_logit_softcapping")
    norm, bias = parts.rms_norm(config, offset=1.0), config.flag("attention_bias", False)
    mlp = BranchSpec(parts.gated_mlp(config, activation="hidden_activation"), pre=norm, post=norm)
    ropes, scale = _ropes(config), config.number("query_pre_attn_scalar", 256.0) ** -0.5
    every, blocks = config.integer("sliding_window_pattern", 6), []
    for window in config.windows(config.integer("num_hidden_layers"), lambda layer: (layer + 1) % every != 0,
                                 config.integer("sliding_window", 4096)):
        attention = parts.attention(config, rope=ropes[window > 0], window=window, scale=scale, norm=QueryKeyNorm(norm),
                                    bias=bias)
        blocks.append(family.BlockSpec(((BranchSpec(attention, pre=norm, post=norm),), (mlp,))))
    head = HeadSpec(config.flag("tie_word_embeddings", True), softcap=config.nullable_number("final_logit_softcapping", 0.0))
    embedding = family.EmbeddingSpec(config.integer("hidden_size") ** 0.5, True)
    return parts.decoder(config, blocks, norm, head=head, embedding=embedding,
                         max_positions=config.integer("max_position_embeddings"))
