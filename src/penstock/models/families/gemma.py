"""Gemma 1 to 3, text only: scaled embeddings and norms around 1; since Gemma 2 norms around each branch, soft caps, and sliding
layers. Of a checkpoint with vision the text part is used."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from penstock.models.families import llama
from penstock.models.family import Config, EmbeddingSpec, HeadSpec, Like, ModelSpec, RopeSpec, parts, rope, rules

ARCHITECTURES = ("GemmaForCausalLM",)
MODEL_TYPES = ("gemma",)
DEFAULTS = {"hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "head_dim": 256, "num_key_value_heads": 16,
            "tie_word_embeddings": True}
RULES = rules.LLAMA
GEMMA2 = (*rules.EMBEDDING, *rules.ATTENTION, *rules.MLP, *rules.SANDWICH_NORMS)
_norm = partial(parts.rms_norm, offset=1.0)


def _embedding(config: Config) -> EmbeddingSpec:
    return EmbeddingSpec(config.integer("hidden_size") ** 0.5, True)


def spec(config: Config) -> ModelSpec:
    config.absent("use_bidirectional_attention")
    # Of the early configs "gelu" means the approximation, too.
    named = "hidden_activation" if "hidden_activation" in config.values else "hidden_act"
    if config.values[named] == "gelu":
        config = config.changed(**{named: "gelu_pytorch_tanh"})
    return llama.spec(config, norm=_norm, mlp=partial(parts.gated_mlp, activation=named), embedding=_embedding(config))


def _sandwiched(config: Config, softcap: float, attends: Mapping[str, Any], **more: Any) -> ModelSpec:
    """`softcap`: of logits, if the config does not say. `attends`: fields of attention."""
    capped = config.nullable_number("final_logit_softcapping", softcap)
    return llama.spec(config, norm=_norm, mlp=partial(parts.gated_mlp, activation="hidden_activation"), post=True,
                      attends={**attends, "scale": config.number("query_pre_attn_scalar", 256.0) ** -0.5},
                      head=HeadSpec(config.flag("tie_word_embeddings", True), softcap=capped),
                      embedding=_embedding(config), **more)


def gemma2(config: Config) -> ModelSpec:
    """Scores are capped, and every second layer slides."""
    config.absent("use_bidirectional_attention")
    return _sandwiched(config, 30.0, {"softcap": config.nullable_number("attn_logit_softcapping", 50.0)},
                       windows=llama.slides(lambda layer: layer % 2 == 0))


def ropes(config: Config) -> tuple[RopeSpec, RopeSpec]:
    """(sliding layers', full layers'): two bases in older configs, two entries today."""
    size, positions = parts.head_size(config), config.integer("max_position_embeddings")
    given = config.values.get("rope_parameters")
    local = (given.get("sliding_attention") if isinstance(given, dict) else None) or {}
    local = {"rope_theta": config.number("rope_local_base_freq", 10000.0), **local}
    return (rope(Config({"rope_parameters": local, "max_position_embeddings": positions}), size),
            rope(config, size, layer_type="full_attention", theta=1000000.0))


def gemma3(config: Config) -> ModelSpec:
    """Queries and keys are normed; sliding layers rotate in their own way."""
    config.absent("use_bidirectional_attention", "attn_logit_softcapping")
    (near, far), every = ropes(config), config.integer("sliding_window_pattern", 6)
    return _sandwiched(config, 0.0, {}, normed="before", turn=near, full={"rope": far},
                       max_positions=config.integer("max_position_embeddings"),
                       windows=llama.slides(lambda layer: (layer + 1) % every != 0))


LIKE = (
    Like(("Gemma2ForCausalLM",), ("gemma2",),
         {"hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "head_dim": 256,
          "num_key_value_heads": 4}, gemma2, GEMMA2),
    Like(("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), ("gemma3_text", "gemma3"),
         {"hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072, "head_dim": 256,
          "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208, "hidden_size": 2304,
          "intermediate_size": 9216, "num_hidden_layers": 26}, gemma3, rules.text_part(GEMMA2)))
