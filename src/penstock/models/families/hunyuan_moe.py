"""Hunyuan 1 MoE (A13B): queries and keys are normed after the rotation; experts beside a shared one in every layer."""

from typing import Any

from penstock.models.families import llama
from penstock.models.family import Config, MixerSpec, ModelSpec, Routing, Rule, parts, rules

ARCHITECTURES = ("HunYuanMoEV1ForCausalLM",)
MODEL_TYPES = ("hunyuan_v1_moe",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
RULES = (
    *Rule.named("model.layers.#.mlp.", {"gate.wg.weight": "mlp.router.weight", "shared_mlp.gate_proj.*": "mlp.shared.gate.*",
        "shared_mlp.up_proj.*": "mlp.shared.up.*", "shared_mlp.down_proj.*": "mlp.shared.down.*"}),
    *rules.EXPERTS,
    *llama.HUNYUAN,
)


def spec(config: Config) -> ModelSpec:
    return llama.spec(_with_theta(config), normed="after", mlps=_mixtures)


def _mixtures(config: Config) -> list[MixerSpec]:
    """Of each layer."""
    wide, experts = config.integer("intermediate_size"), parts.expert_count(config)
    numbers = (_of_each(config, name, default) for name, default in (
        ("moe_topk", 1), ("num_shared_expert", 1), ("moe_intermediate_size", wide)))
    return [parts.experts(config.changed(moe_intermediate_size=inner), Routing(experts, picks, normalise=True),
                          shared_inner=shared * wide) for picks, shared, inner in zip(*numbers, strict=True)]


def _of_each(config: Config, name: str, default: int) -> list[int]:
    """A value that configs state once, or for each layer."""
    layers = config.integer("num_hidden_layers")
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
