"""Llama 4 (text): interleaved rotation but in every fourth layer, normed queries and keys, experts fed with weighted inputs.

Rotating layers attend within chunks of `attention_chunk_size` positions, and the others scale queries from `floor_scale`
positions on. Both begin behind the context that is offered here, so attention is plain."""

from dataclasses import replace
from typing import Any

from penstock.models.family import Config, ModelSpec, QueryKeyNorm, RMSNormSpec, Rule, parts, rope, rules

ARCHITECTURES = ("Llama4ForCausalLM", "Llama4ForConditionalGeneration")
MODEL_TYPES = ("llama4_text", "llama4")
DEFAULTS = {"max_position_embeddings": 4096 * 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 1, "num_local_experts": 16, "intermediate_size_mlp": 16384, "attention_chunk_size": 8192,
            "floor_scale": 8192}
RULES = rules.text_part((
    *Rule.named("model.layers.#.feed_forward.", {"router.weight": "mlp.router.weight",
        "experts.gate_up_proj": ("mlp.experts.gate_up.weight", rules.stacked_transposed),
        "experts.down_proj": ("mlp.experts.down.weight", rules.stacked_transposed),
        **rules.projections("shared_expert", "mlp.shared")}),
    *Rule.named("model.layers.#.", rules.projections("feed_forward", "mlp")),
    *rules.LLAMA))


def spec(config: Config) -> ModelSpec:
    norm, bias, layers = parts.rms_norm(config), config.flag("attention_bias", False), config.integer("num_hidden_layers")
    turn = rope(config, parts.head_size(config), theta=500000.0, interleaved=True)
    every, step = config.integer("no_rope_layer_interval", 4), config.integer("interleave_moe_layer_step", 1)
    config = config.changed(no_rope_layers=config.values.get("no_rope_layers") or None)  # an empty list says nothing
    turns = config.layers("no_rope_layers", 0, 1, lambda layer: (layer + 1) % every != 0)
    sparse = config.values.get("moe_layers", range(step - 1, layers, step))
    mixture = replace(parts.experts(config, parts.routing(config, "sigmoid_after"), inner="intermediate_size",
                                    shared_inner=config.integer("intermediate_size")), inward=True)
    mlp = parts.gated_mlp(config.changed(intermediate_size=config.integer("intermediate_size_mlp")))
    # Without weights, the norm after the rotation is that before it, but for the rotation's amplitude, which it takes away.
    heads = QueryKeyNorm(RMSNormSpec(norm.eps, weight=False)) if config.flag("use_qk_norm", True) else None
    scaling: Any = turn.scaling
    if heads and scaling.amplitude() != 1.0:
        turn = replace(turn, scaling=replace(scaling, attention_factor=1.0))
    attentions = [parts.attention(config, rope=turn if turned else None, norm=heads if turned else None, bias=bias)
                  for turned in turns]
    mlps = [mixture if i in sparse else mlp for i in range(layers)]
    plain = min(config.nullable_integer("attention_chunk_size", 8192) or 1 << 30, config.integer("max_position_embeddings"))
    if config.values.get("attn_temperature_tuning", True):  # published configs say 4
        plain = min(plain, config.integer("floor_scale") - 1)
    return parts.layered(config, attentions, mlps, norm, max_positions=plain)
