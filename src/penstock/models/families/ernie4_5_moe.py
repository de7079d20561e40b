"""Ernie 4.5 MoE (text): interleaved rotation, experts by corrected softmax from some layer on, and shared ones."""

from dataclasses import replace

from penstock.models.family import Config, HeadSpec, ModelSpec, Rule, parts, rope, rules

ARCHITECTURES = ("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoEForCausalLM")
MODEL_TYPES = ("ernie4_5_moe",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 131072, "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
            "moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1, "moe_layer_end_index": -1}
RULES = (
    Rule("model.layers.#.mlp.[gate.]moe_statics.e_score_correction_bias", "blocks.#.mlp.correction", rules.flat),
    Rule("lm_head.bias", "head.bias"),
    Rule("model.mtp_**", None),
    *rules.EXPERTS,
    *rules.LLAMA,
)


def spec(config: Config) -> ModelSpec:
    norm, bias, layers = parts.rms_norm(config), config.flag("use_bias", False), config.integer("num_hidden_layers")
    config = config.changed(num_experts_per_tok=config.integer("moe_k"))
    routing = parts.routing(config, normalise=True, corrected=True, least=config.number("moe_norm_min", 1e-12))
    shared = config.integer("moe_num_shared_experts", least=0) * config.integer("moe_intermediate_size")
    mixture = replace(parts.experts(config, routing, shared_inner=shared), shared_bias=bias)
    attention = parts.attention(config, rope=rope(config, parts.head_size(config), theta=500000.0, interleaved=True), bias=bias)
    first, last = (config.integer(f"moe_layer_{end}_index", least=-1) for end in ("start", "end"))
    chosen, every = range(first, (last if last >= 0 else layers - 1) + 1), config.integer("moe_layer_interval", 1)
    mlp = parts.gated_mlp(config, bias=bias)
    mlps = [mixture if i in chosen and (i + 1) % every == 0 else mlp for i in range(layers)]
    return parts.layered(config, attention, mlps, norm, head=HeadSpec(config.flag("tie_word_embeddings", True), bias=bias))
