"""Llama 1 to 3.3, the many models of the same shape, and in `LIKE` those that differ from it in a few numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from penstock.models.family import Config, LayerNormSpec, MLPSpec, ModelSpec, QueryKeyNorm, Rule, flat, parts, rope, rules

ARCHITECTURES = ("LlamaForCausalLM",)
MODEL_TYPES = ("llama",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 2048}
RULES = rules.LLAMA


def spec(config: Config, *, norm: Callable[[Config], Any] = parts.rms_norm, mlp: Callable[..., MLPSpec] = parts.gated_mlp,
         theta: float = 10000.0, fraction: float = 1.0, normed: str = "",
         window: Callable[[int], bool] | None = None) -> ModelSpec:
    """`normed`: queries and keys are, "before" or "after" rotation. `window`: layers that slide, unless the config says."""
    each, bias, layers = norm(config), config.flag("attention_bias", False), config.integer("num_hidden_layers")
    turn = rope(config, parts.head_size(config), theta=theta, fraction=fraction)
    attention = parts.attention(config, rope=turn, bias=bias, output_bias=config.flag("attention_out_bias", bias),
                                norm=QueryKeyNorm(each, after=normed == "after") if normed else None)
    attention = replace(attention, clip=config.nullable_number("clip_qkv", 0.0))
    windows = config.windows(layers, window, config.nullable_integer("sliding_window", 4096)) if window else [0] * layers
    forward = mlp(config, bias=config.flag("mlp_bias", False))
    blocks = [parts.pre_norm_block(replace(attention, window=width), forward, each) for width in windows]
    return parts.decoder(config, blocks, each)


@dataclass(frozen=True, eq=False)
class Like:
    """The members of a family's file."""

    ARCHITECTURES: tuple[str, ...]
    MODEL_TYPES: tuple[str, ...]
    DEFAULTS: Mapping[str, Any]
    spec: Callable[[Config], ModelSpec]
    RULES: Sequence[Rule] = RULES


APERTUS = (
    *Rule.named("model.layers.#.", {"attention_layernorm.weight": "attention.pre.weight",
        "feedforward_layernorm.weight": "mlp.pre.weight", "mlp.act_fn.*": ("mlp.act.*", flat)}),
    *rules.EMBEDDING, *rules.ATTENTION, *rules.MLP,
)
HUNYUAN = (
    Rule("model.layers.#.self_attn.query_layernorm.weight", "blocks.#.attention.q_norm.weight"),
    Rule("model.layers.#.self_attn.key_layernorm.weight", "blocks.#.attention.k_norm.weight"),
    *rules.LLAMA,
)
LIKE = (
    Like(("ApertusForCausalLM",), ("apertus",),
         {"hidden_act": "xielu", "max_position_embeddings": 65536, "rms_norm_eps": 1e-5},
         partial(spec, mlp=parts.plain_mlp, theta=12000000.0, normed="before"), APERTUS),
    Like(("ArceeForCausalLM",), ("arcee",), {"hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
         partial(spec, mlp=parts.plain_mlp)),
    Like(("CwmForCausalLM",), ("cwm",),
         {"hidden_act": "silu", "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128,
          "rms_norm_eps": 1e-5, "sliding_window": 8192},
         partial(spec, theta=1000000.0, window=lambda layer: layer % 4 != 0)),
    Like(("HunYuanDenseV1ForCausalLM",), ("hunyuan_v1_dense",),
         {"hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5}, partial(spec, normed="after"), HUNYUAN),
    Like(("Jais2ForCausalLM",), ("jais2",),
         {"hidden_act": "relu2", "max_position_embeddings": 8192, "attention_bias": True, "mlp_bias": True},
         partial(spec, norm=parts.layer_norm, mlp=parts.plain_mlp, theta=500000.0), rules.LAYER_NORM_LLAMA),
    Like(("MistralForCausalLM",), ("mistral",),
         {"hidden_act": "silu", "max_position_embeddings": 131072, "num_key_value_heads": 8},
         partial(spec, window=lambda _layer: True)),
    Like(("NemotronForCausalLM",), ("nemotron",), {"hidden_act": "relu2", "max_position_embeddings": 4096},
         partial(spec, norm=partial(parts.layer_norm, name="norm_eps", offset=1.0), mlp=parts.plain_mlp, fraction=0.5),
         rules.LAYER_NORM_LLAMA),
    Like(("OlmoForCausalLM",), ("olmo",), DEFAULTS,
         partial(spec, norm=lambda _config: LayerNormSpec(1e-5, bias=False, weight=False))),
    Like(("SeedOssForCausalLM",), ("seed_oss",),
         {"hidden_act": "silu", "max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128,
          "attention_bias": True, "attention_out_bias": False}, spec),
)
