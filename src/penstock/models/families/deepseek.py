"""DeepSeek V2, V3, R1 and V3.2, Kimi K2: latent attention, dense layers first, then mixtures of experts.

Layers behind the last one draft (multi-token prediction): `models/draft_heads.py`."""

import dataclasses

from penstock.models import family
from penstock.models.family import Config, MixerSpec, ModelSpec, Routing, Rule, SparseLatentAttentionSpec, parts, rope, rules

ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM")
MODEL_TYPES = ("deepseek_v2", "deepseek_v32", "deepseek_v3", "kimi_k2")
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 2048, "topk_method": "greedy"}
RULES = (
    *Rule.named("model.layers.#.", {"self_attn.indexer.wq_b.*": "attention.index_q.*",
        "self_attn.indexer.wk.*": "attention.index_k.*", "self_attn.indexer.weights_proj.*": "attention.index_weights.*",
        "self_attn.indexer.k_norm.*": "attention.index_norm.*"}),
    *rules.EMBEDDING, *rules.LATENT_ATTENTION, *rules.EXPERTS, *rules.MLP, *rules.PRE_NORMS)


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


def _sparse(config: Config, attention: family.LatentAttentionSpec) -> SparseLatentAttentionSpec:
    if not attention.query_rank:
        raise config.wrong("q_lora_rank", "a whole number: index queries are made from the queries' inner vector")
    given = {field.name: getattr(attention, field.name) for field in dataclasses.fields(attention)}
    return SparseLatentAttentionSpec(**given, index_heads=config.integer("index_n_heads", 64),
                                     index_size=config.integer("index_head_dim", 128), picks=config.integer("index_topk", 2048))


def spec(config: Config) -> ModelSpec:
    norm, layers = parts.rms_norm(config), config.integer("num_hidden_layers")
    turn = rope(config, config.integer("qk_rope_head_dim"), interleaved=config.flag("rope_interleave", True))
    attention = parts.latent_attention(config, turn)
    if config.named("DeepseekV32ForCausalLM", "deepseek_v32"):
        attention = _sparse(config, attention)
    dense = min(config.integer("first_k_dense_replace", 0, least=0), layers)
    if config.integer("moe_layer_freq", 1) != 1:
        raise config.wrong("moe_layer_freq", "1")
    mlps: list[MixerSpec] = [parts.gated_mlp(config)] * dense
    if dense < layers:
        shared = config.nullable_integer("n_shared_experts", 0) * config.integer("moe_intermediate_size")
        mlps += [parts.experts(config, routing(config), shared_inner=shared)] * (layers - dense)
    return parts.layered(config, attention, mlps, norm, beyond=parts.draft_layers(config))
