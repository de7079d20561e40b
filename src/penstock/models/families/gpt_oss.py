"""gpt-oss: attention sinks, a window in every second layer, and experts with biases whose activation is clamped."""

import dataclasses

import torch

from penstock.models.families import llama
from penstock.models.family import Config, Glu, MixerSpec, ModelSpec, Rule, parts, rules

ARCHITECTURES = ("GptOssForCausalLM",)
MODEL_TYPES = ("gpt_oss",)
DEFAULTS = {"max_position_embeddings": 131072, "head_dim": 64, "rms_norm_eps": 1e-5, "num_experts_per_tok": 4,
            "attention_bias": True, "num_key_value_heads": 8,
            "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}}


def _halves(tensor: torch.Tensor, _spec: ModelSpec) -> torch.Tensor:
    """[E, inputs, 2 F] or [E, 2 F], a gate beside its up, to the experts' rows [E * 2 F, inputs] or [E * 2 F], gates first."""
    rows = tensor if tensor.dim() == 2 else tensor.transpose(1, 2)
    return rows.reshape(len(rows), -1, 2, *rows.shape[2:]).transpose(1, 2).flatten(0, 2)


RULES = (
    *rules.EMBEDDING, *rules.ATTENTION, *rules.PRE_NORMS,
    *Rule.named("model.layers.#.", {"mlp.router.*": "mlp.router.*",
        "mlp.experts.gate_up_proj": ("mlp.experts.gate_up.weight", _halves),
        "mlp.experts.gate_up_proj_bias": ("mlp.experts.gate_up.bias", _halves),
        "mlp.experts.down_proj": ("mlp.experts.down.weight", rules.stacked_transposed),
        "mlp.experts.down_proj_bias": "mlp.experts.down.bias"}))


def _experts(config: Config) -> MixerSpec:
    return dataclasses.replace(
        parts.experts(config, parts.routing(config, "softmax_after"), inner="intermediate_size"), bias=True, router_bias=True,
        glu=Glu("silu", config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0), 1.0))


def spec(config: Config) -> ModelSpec:
    return llama.spec(config, theta=150000.0, mlps=_experts, attends={"sinks": True},
                      windows=llama.slides(lambda layer: layer % 2 == 0, 128))
