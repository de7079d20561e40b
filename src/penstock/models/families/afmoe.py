"""AFMoE (Trinity): attention whose results are gated, rotation in sliding layers alone, norms around each branch, experts."""

import dataclasses

from penstock.models.family import Config, EmbeddingSpec, ModelSpec, QueryKeyNorm, Rule, parts, rope, rules

ARCHITECTURES = ("AfmoeForCausalLM",)
MODEL_TYPES = ("afmoe",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 16384, "head_dim": 128, "rms_norm_eps": 1e-5}
RULES = (
    *Rule.named("model.layers.#.", {"self_attn.gate_proj.*": "attention.gate.*",
        "post_attention_layernorm.weight": "attention.post.weight", "pre_mlp_layernorm.weight": "mlp.pre.weight",
        "post_mlp_layernorm.weight": "mlp.post.weight", "mlp.router.gate.weight": "mlp.router.weight",
        "mlp.expert_bias": "mlp.correction"}),
    *rules.EXPERTS,
    *rules.LLAMA,
)


def spec(config: Config) -> ModelSpec:
    norm, layers = parts.rms_norm(config), config.integer("num_hidden_layers")
    if config.integer("n_group", 1) != 1 or config.integer("topk_group", 1) != 1:
        raise config.wrong("n_group", "1: experts in groups are not there")
    routing = parts.routing(config, "sigmoid", normalise=True, scale=config.number("route_scale", 1.0), corrected=True)
    shared = config.integer("num_shared_experts", 0, least=0) * config.integer("moe_intermediate_size")
    mixture, mlp = parts.experts(config, routing, shared_inner=shared), parts.gated_mlp(config)
    every, dense = config.integer("global_attn_every_n_layers", 4), config.integer("num_dense_layers", 1, least=0)
    windows = config.windows(lambda layer: (layer + 1) % every != 0, config.integer("sliding_window", 1024))
    full = dataclasses.replace(parts.attention(config, rope=None, norm=QueryKeyNorm(norm)), gate=True)
    turned = dataclasses.replace(full, rope=rope(config, parts.head_size(config)))
    scale = config.integer("hidden_size") ** 0.5 if config.flag("mup_enabled", False) else 1.0
    return parts.layered(config, parts.sliding(turned, windows, full), [mlp if i < dense else mixture for i in range(layers)],
                         norm, post=True, embedding=EmbeddingSpec(scale))
