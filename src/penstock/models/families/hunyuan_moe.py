"""Hunyuan 1 MoE (A13B): queries and keys are normed after the rotation; experts beside a shared one in every layer."""

from typing import Any

from penstock.models.family import Config, ModelSpec, QueryKeyNorm, Routing, Rule, parts, rope, rules

ARCHITECTURES = ("HunYuanMoEV1ForCausalLM",)
MODEL_TYPES = ("hunyuan_v1_moe",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
RULES = (
    *Rule.named("model.layers.#.", {"self_attn.query_layernorm.weight": "attention.q_norm.weight",
        "self_attn.key_layernorm.weight": "attention.k_norm.weight", "mlp.gate.wg.weight": "mlp.router.weight",
        "mlp.shared_mlp.gate_proj.*": "mlp.shared.gate.*", "mlp.shared_mlp.up_proj.*": "mlp.shared.up.*",
        "mlp.shared_mlp.down_proj.*": "mlp.shared.down.*"}),
    *rules.EXPERTS,
    *rules.LLAMA,
)


def spec(config: Config) -> ModelSpec:
    norm, bias, layers = parts.rms_norm(config), config.flag("attention_bias", False), config.integer("num_hidden_layers")
    picks = _of_each(config, "moe_topk", layers, 1)
    shared = _of_each(config, "num_shared_expert", layers, 1)
    inner = _of_each(config, "moe_intermediate_size", layers, config.integer("intermediate_size"))
    turn = rope(_with_theta(config), parts.head_size(config))
    attention = parts.attention(config, rope=turn, bias=bias, norm=QueryKeyNorm(norm, after=True))
    blocks = []
    for i in range(layers):
        sized = Config({**config.given, "moe_intermediate_size": inner[i]}, DEFAULTS)
        mixture = parts.experts(sized, Routing(parts.expert_count(config), picks[i], normalise=True),
                                shared_inner=shared[i] * config.integer("intermediate_size"))
        blocks.append(parts.pre_norm_block(attention, mixture, norm))
    return parts.decoder(config, blocks, norm)


def _of_each(config: Config, name: str, layers: int, default: int) -> list[int]:
    """A value that configs state once, or for each layer."""
    if isinstance(config.values.get(name), list):
        found = config.listing(name, layers, lambda value: isinstance(value, int) and value > 0, "a whole number above 0")
        return found or []
    return [config.integer(name, default)] * layers


def _with_theta(config: Config) -> Config:
    """Where the rotation is called dynamic but has an `alpha`, that is a fixed factor of the base (NTK-aware scaling)."""
    name = "rope_parameters" if "rope_parameters" in config.values else "rope_scaling"
    given: dict[str, Any] = config.values.get(name) or {}
    if not isinstance(given, dict) or not given.get("alpha"):
        return config
    size, theta = parts.head_size(config), given.get("rope_theta", config.number("rope_theta", 10000.0))
    return Config({**config.given, name: None, "rope_parameters": {
        "rope_type": "default", "rope_theta": theta * given["alpha"] ** (size / (size - 2))}}, DEFAULTS)
