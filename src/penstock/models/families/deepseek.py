"""DeepSeek V2, V3 and R1, Kimi K2: latent attention, dense layers first, then mixtures of experts.

The layers behind the last one, which draft (multi-token prediction), are not loaded.
"""

from __future__ import annotations

import dataclasses

from penstock.layers.spec import ModelSpec
from penstock.models import parts, rules
from penstock.models.config import Config, rope
from penstock.ops.routing import Routing

ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 2048, "topk_method": "greedy"}
RULES = (*rules.EMBEDDING, *rules.LATENT_ATTENTION, *rules.EXPERTS, *rules.MLP, *rules.PRE_NORMS)


def routing(config: Config) -> Routing:
    """V3's router (sigmoid with a correction) or V2's (softmax), by which of their keys there are."""
    groups, picked = config.nullable_integer("n_group", 1), config.nullable_integer("topk_group", 1)
    experts, picks = parts.expert_count(config), config.integer("num_experts_per_tok")
    scale = config.number("routed_scaling_factor", 1.0)
    if groups and experts % groups:
        raise config.wrong("n_group", f"a divisor of the number of experts ({experts})")
    if "DeepseekV2ForCausalLM" in config.values.get("architectures", ()) or config.values.get("model_type") == "deepseek_v2":
        config.absent("norm_topk_prob")
        limited = config.choice("topk_method", {"greedy": "", "group_limited_greedy": "limited"}) != ""
        return Routing(experts, picks, scale=scale, groups=groups if limited else 1, picked_groups=picked if limited else 1,
                       group_score="max")
    return Routing(experts, picks, "sigmoid", config.flag("norm_topk_prob", True), scale, True, groups or 1, picked or 1)


def spec(config: Config) -> ModelSpec:
    norm, layers = parts.rms_norm(config), config.integer("num_hidden_layers")
    turn = rope(config, config.integer("qk_rope_head_dim"), interleaved=config.flag("rope_interleave", True))
    attention = parts.latent_attention(config, turn)
    dense = min(config.integer("first_k_dense_replace", 0, least=0), layers)
    if config.integer("moe_layer_freq", 1) != 1:
        raise config.wrong("moe_layer_freq", "1")
    blocks = [parts.pre_norm_block(attention, parts.gated_mlp(config), norm)] * dense
    if dense < layers:
        shared = config.nullable_integer("n_shared_experts", 0) * config.integer("moe_intermediate_size")
        mixture = parts.experts(config, routing(config), shared_inner=shared)
        blocks += [parts.pre_norm_block(attention, mixture, norm)] * (layers - dense)
    return dataclasses.replace(parts.decoder(config, blocks, norm),
                               beyond=parts.draft_layers(config))
