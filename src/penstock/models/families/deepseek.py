"""DeepSeek V2, V3, R1 and V3.2, Kimi K2, GLM-4.7-Flash, GLM-5, A.X K1, Sarvam 105B: latent attention, dense layers first, then
mixtures of experts.
Youtu-LLM: dense layers alone.

Layers behind the last one draft (multi-token prediction): `models/draft_heads.py`."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from penstock.models import family
from penstock.models.family import Config, Like, ModelSpec, Routing, Rule, SparseLatentAttentionSpec, parts, rope, rules

ARCHITECTURES = ("DeepseekV3ForCausalLM",)
MODEL_TYPES = ("deepseek_v3", "kimi_k2")
_ALL = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DEFAULTS = {**_ALL, "max_position_embeddings": 4096, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
            "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
RULES = (
    *Rule.named("model.layers.#.", {"self_attn.indexer.wq_b.*": "attention.index_q.*",
        "self_attn.indexer.wk.*": "attention.index_k.*", "self_attn.indexer.weights_proj.*": "attention.index_weights.*",
        "self_attn.indexer.k_norm.*": "attention.index_norm.*"}),
    *rules.EMBEDDING, *rules.LATENT_ATTENTION, *rules.EXPERTS, *rules.MLP, *rules.PRE_NORMS)


def routing(config: Config) -> Routing:
    """V3's router (sigmoid with a correction), or V2's (softmax)."""
    old = config.named("DeepseekV2ForCausalLM", "deepseek_v2")
    if config.values.get("scoring_func", "") not in ("", "softmax" if old else "sigmoid"):
        raise config.wrong("scoring_func", "softmax" if old else "sigmoid")
    if not old:
        return parts.sigmoid_routing(config)
    config.absent("norm_topk_prob")
    if config.choice("topk_method", {"greedy": "", "group_limited_greedy": "limited"}) == "":
        config = config.changed(n_group=1, topk_group=1)
    return dataclasses.replace(parts.sigmoid_routing(config), score="softmax", normalise=False, corrected=False,
                               group_score="max")


def _sparse(config: Config, attention: family.LatentAttentionSpec) -> SparseLatentAttentionSpec:
    if not attention.query_rank:
        raise config.wrong("q_lora_rank", "a whole number: index queries are made from the queries' inner vector")
    config.absent("index_topk_pattern")
    config.listing("indexer_types", config.integer("num_hidden_layers"), "full".__eq__, "full: none takes another's picks")
    config.only("index_topk_freq", 1, "1: no layer takes the picks of another")
    return SparseLatentAttentionSpec(**vars(attention), index_heads=config.integer("index_n_heads", 64),
                                     index_size=config.integer("index_head_dim", 128), picks=config.integer("index_topk"),
                                     index_interleaved=config.named("GlmMoeDsaForCausalLM", "glm_moe_dsa"))


def spec(config: Config, mlps: Callable[[Config], Any] | None = None) -> ModelSpec:
    """`mlps`: the layers' feed-forward parts, if they are not DeepSeek's."""
    turn = rope(config, config.integer("qk_rope_head_dim"), interleaved=config.flag("rope_interleave", True),
                aliases={"deepseek_yarn": "yarn"})
    attention = parts.latent_attention(config, turn)
    if "index_topk" in config.values:
        attention = _sparse(config, attention)
    config.only("moe_layer_freq", 1, "1")
    bias = config.named("DeepseekV2ForCausalLM", "deepseek_v2") and config.flag("mlp_bias", False)
    forward = mlps(config) if mlps else parts.dense_then_experts(config, routing, bias=bias)
    return parts.layered(config, attention, forward, parts.rms_norm(config), beyond=parts.draft_layers(config))


def axk1(config: Config) -> ModelSpec:
    """One more norm after each mixture. Published checkpoints route without a correction, which their `topk_method` says."""
    corrected = config.values.get("topk_method", "noaux_tc") == "noaux_tc"
    found = spec(config, partial(parts.dense_then_experts, routing=lambda config: dataclasses.replace(
        routing(config), corrected=corrected)))
    blocks = []
    for attention, (mlp,) in (block.stages for block in found.blocks):
        post = None if isinstance(mlp.body, family.MLPSpec) else parts.rms_norm(config)
        blocks.append(family.BlockSpec((attention, (dataclasses.replace(mlp, post=post),))))
    return dataclasses.replace(found, blocks=tuple(blocks))


LIKE = (
    Like(("AXK1ForCausalLM",), ("axk1",), {**DEFAULTS, "max_position_embeddings": 32768, "n_routed_experts": 192,
         "first_k_dense_replace": 1}, axk1,
         (Rule("model.layers.#.[mlp.]post_mlp_layernorm.weight", "blocks.#.mlp.post.weight", spare=True), *RULES)),
    Like(("SarvamMLAForCausalLM",), ("sarvam_mla",), {**DEFAULTS, "q_lora_rank": 0, "n_routed_experts": 128, "n_group": 1,
         "topk_group": 1, "first_k_dense_replace": 1},
         lambda config: spec(config.renamed(num_shared_experts="n_shared_experts")), RULES),
    Like(("DeepseekV2ForCausalLM",), ("deepseek_v2",), {**_ALL, "max_position_embeddings": 2048, "topk_method": "greedy",
         "n_routed_experts": 64, "n_shared_experts": 2}, spec, RULES),
    Like(("DeepseekV32ForCausalLM",), ("deepseek_v32",), {**DEFAULTS, "max_position_embeddings": 163840, "index_topk": 2048},
         spec, RULES),
    Like(("GlmMoeDsaForCausalLM",), ("glm_moe_dsa",),
         {**DEFAULTS, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "q_lora_rank": 2048, "qk_nope_head_dim": 192,
          "v_head_dim": 256, "n_group": 1, "topk_group": 1, "index_topk": 2048, "index_n_heads": 32}, spec, RULES),
    Like(("Glm4MoeLiteForCausalLM",), ("glm4_moe_lite",), {**_ALL, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5,
         "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_routed_experts": 64, "n_shared_experts": 1,
         "num_experts_per_tok": 4, "first_k_dense_replace": 1, "routed_scaling_factor": 1.8}, spec, RULES),
    Like(("YoutuForCausalLM",), ("youtu",), {**_ALL, "max_position_embeddings": 131072, "tie_word_embeddings": True},
         partial(spec, mlps=parts.gated_mlp), RULES))
