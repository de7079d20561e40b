"""Gemma 1 to 3, text only: scaled embeddings and norms around 1; since Gemma 2 norms around each branch, soft caps, and sliding
layers. Of a checkpoint with vision the text part is used; its other tensors are named below as not wanted."""

from dataclasses import replace
from functools import partial
from typing import Any

from penstock.models import family
from penstock.models.families import llama
from penstock.models.family import AttentionSpec, Config, Like, ModelSpec, QueryKeyNorm, RopeSpec, Rule, parts, rope, rules

ARCHITECTURES = ("GemmaForCausalLM",)
MODEL_TYPES = ("gemma",)
DEFAULTS = {"hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "head_dim": 256, "num_key_value_heads": 16,
            "tie_word_embeddings": True}
RULES = rules.LLAMA
GEMMA2 = (*rules.EMBEDDING, *rules.ATTENTION, *rules.MLP, *rules.SANDWICH_NORMS)
GEMMA3 = (
    *(replace(rule, source=rule.source.replace("model.", "[language_model.]model.[language_model.]", 1))
      for rule in GEMMA2 if rule.source.startswith("model.")),
    Rule("[language_model.]lm_head.weight", "head.weight"),
    Rule("[model.]vision_tower.**", None),
    Rule("[model.]multi_modal_projector.**", None),
)
_norm = partial(parts.rms_norm, offset=1.0)


def _embedding(config: Config) -> family.EmbeddingSpec:
    return family.EmbeddingSpec(config.integer("hidden_size") ** 0.5, True)


def spec(config: Config) -> ModelSpec:
    config.absent("use_bidirectional_attention")
    # Of the early configs "gelu" means the approximation, too.
    named = "hidden_activation" if "hidden_activation" in config.values else "hidden_act"
    if config.values[named] == "gelu":
        config = config.changed(**{named: "gelu_pytorch_tanh"})
    return llama.spec(config, norm=_norm, mlp=partial(parts.gated_mlp, activation=named), embedding=_embedding(config))


def _attention(config: Config, turn: RopeSpec, **more: Any) -> AttentionSpec:
    return parts.attention(config, rope=turn, scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
                           bias=config.flag("attention_bias", False), **more)


def _sandwiched(config: Config, attentions: list[AttentionSpec], softcap: float, **more: Any) -> ModelSpec:
    capped = config.nullable_number("final_logit_softcapping", softcap)
    return parts.layered(config, attentions, parts.gated_mlp(config, activation="hidden_activation"), _norm(config), post=True,
                         head=family.HeadSpec(config.flag("tie_word_embeddings", True), softcap=capped),
                         embedding=_embedding(config), **more)


def gemma2(config: Config) -> ModelSpec:
    """Scores are capped, and every second layer slides."""
    config.absent("use_bidirectional_attention")
    attention = _attention(config, rope(config, parts.head_size(config)),
                           softcap=config.nullable_number("attn_logit_softcapping", 50.0))
    return _sandwiched(config, parts.sliding(attention, llama.slides(lambda layer: layer % 2 == 0)(config)), 30.0)


def gemma3(config: Config) -> ModelSpec:
    """Queries and keys are normed. Sliding layers have a rotation of their own: older configs have two bases, today's two
    entries."""
    config.absent("use_bidirectional_attention", "attn_logit_softcapping")
    size, positions = parts.head_size(config), config.integer("max_position_embeddings")
    given = config.values.get("rope_parameters")
    local = (given.get("sliding_attention") if isinstance(given, dict) else None) or {}
    local = {"rope_theta": config.number("rope_local_base_freq", 10000.0), **local}
    near = rope(Config({"rope_parameters": local, "max_position_embeddings": positions}), size)
    far = rope(config, size, layer_type="full_attention", theta=1000000.0)
    full, every = _attention(config, far, norm=QueryKeyNorm(_norm(config))), config.integer("sliding_window_pattern", 6)
    windows = config.windows(lambda layer: (layer + 1) % every != 0, config.integer("sliding_window", 4096))
    return _sandwiched(config, parts.sliding(replace(full, rope=near), windows, full), 0.0, max_positions=positions)


LIKE = (
    Like(("Gemma2ForCausalLM",), ("gemma2",),
         {"hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "head_dim": 256,
          "num_key_value_heads": 4}, gemma2, GEMMA2),
    Like(("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), ("gemma3_text", "gemma3"),
         {"hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072, "head_dim": 256,
          "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208, "hidden_size": 2304,
          "intermediate_size": 9216, "num_hidden_layers": 26}, gemma3, GEMMA3),
)
