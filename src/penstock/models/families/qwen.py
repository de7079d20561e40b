"""Qwen 1.5 to 3, dense and with experts, and MiMo. Upper layers may slide. Queries, keys and values have biases in Qwen 2; in
Qwen 3 each head's query and key are normed. In Qwen3-Next and Qwen3.5 most layers are recurrent."""

from collections.abc import Callable
from functools import partial

from penstock.layers.delta import DeltaSpec
from penstock.models.families import llama
from penstock.models.family import ACTIVATIONS, Config, Like, MixerSpec, ModelSpec, QueryKeyNorm, Rule, flat, parts, rope, rules
from penstock.ops.delta import DeltaShape

ARCHITECTURES = ("Qwen2ForCausalLM", "MiMoForCausalLM")
MODEL_TYPES = ("qwen2", "mimo")
DEFAULTS = {"max_position_embeddings": 32768}
RULES = (Rule("model.mtp_layers.**", None), *rules.LLAMA)


def upper_windows(config: Config) -> list[int]:
    """Each layer's window: from `max_window_layers` on, if `use_sliding_window`."""
    first = config.integer("max_window_layers", 28, least=0)
    return config.windows(lambda layer: layer >= first, _window(config))


def _window(config: Config) -> int:
    return config.nullable_integer("sliding_window", 4096) if config.flag("use_sliding_window", False) else 0


def spec(config: Config) -> ModelSpec:
    config.absent("dual_chunk_attention_config")
    return llama.spec(config.changed(attention_bias=True, attention_out_bias=False), windows=upper_windows)


def qwen2_moe(config: Config) -> ModelSpec:
    """A shared expert, whose result is gated, in each mixture. Every second one of the lower layers may slide."""
    first = config.integer("max_window_layers", 28, least=0)
    windows = config.windows(lambda layer: layer < first and layer % 2 == 0, _window(config))
    shared = config.integer("shared_expert_intermediate_size")
    return llama.spec(config.changed(attention_bias=config.flag("qkv_bias", True), attention_out_bias=False),
                      mlps=partial(parts.some_experts, shared_inner=shared, shared_gate=True), windows=lambda _config: windows)


def experts_everywhere(config: Config) -> MixerSpec:
    """Qwen3.5's feed-forward part: the weights of experts are normalised, and a shared one's result is gated."""
    return parts.experts(config, parts.routing(config, normalise=True), shared_gate=True,
                         shared_inner=config.integer("shared_expert_intermediate_size"))


def qwen3_next(config: Config, apart: bool = False, mlp: Callable[[Config], MixerSpec] | None = None) -> ModelSpec:
    """Gated delta nets, and every fourth layer attention whose results are gated. Norms but those of the former are 1 + w."""
    if config.choice("hidden_act", ACTIVATIONS) != "silu":
        raise config.wrong("hidden_act", "silu, which is that of the delta nets' convolution, too")
    norm, every = parts.rms_norm(config, 1.0), config.integer("full_attention_interval", 4)
    attention = parts.attention(config, rope=rope(config, parts.head_size(config), fraction=0.25), norm=QueryKeyNorm(norm),
                                bias=config.flag("attention_bias", False), gate=True, paired=True)
    keys, values, key_size, value_size, kernel = (config.integer(f"linear_{name}") for name in (
        "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"))
    shape = DeltaShape(keys, values, key_size, value_size, kernel, norm.eps)
    if shape.heads % shape.key_heads:
        raise config.wrong("linear_num_value_heads", f"a multiple of linear_num_key_heads ({shape.key_heads})")
    if not 2 <= shape.kernel <= 4:
        raise config.wrong("linear_conv_kernel_dim", "2 to 4")
    delta = DeltaSpec(attention.width, shape, apart=apart)
    full = config.layers("layer_types", "linear_attention", "full_attention", lambda layer: (layer + 1) % every == 0)
    mlps: MixerSpec | list[MixerSpec] = mlp(config) if mlp else parts.some_experts(
        config, shared_inner=config.integer("shared_expert_intermediate_size"), shared_gate=True)
    return parts.layered(config, [attention if one else delta for one in full], mlps, norm)


NEXT = (
    Rule("mtp.**", None),
    *Rule.named("model.layers.#.linear_attn.", {"in_proj_qkvz.*": "attention.qkvz.*", "in_proj_ba.*": "attention.ba.*",
        "in_proj_qkv.*": "attention.input.*", **{f"in_proj_{name}.*": f"attention.{name}.*" for name in "zba"},
        "conv1d.weight": ("attention.conv.weight", flat), "A_log": "attention.decay", "dt_bias": "attention.step",
        "norm.weight": "attention.norm.weight", "out_proj.*": "attention.out.*"}), *rules.QWEN_EXPERTS, *rules.LLAMA)
_NEXT_SIZES = {**DEFAULTS, "head_dim": 256, "num_key_value_heads": 2, "moe_intermediate_size": 512, "norm_topk_prob": True,
               "shared_expert_intermediate_size": 512, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
               "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
LIKE = (
    Like(("Qwen3NextForCausalLM",), ("qwen3_next",), {**_NEXT_SIZES, "num_experts": 512, "num_experts_per_tok": 10}, qwen3_next,
         NEXT),
    Like(("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), ("qwen3_5_text", "qwen3_5"),
         {**_NEXT_SIZES, "num_key_value_heads": 4}, partial(qwen3_next, apart=True, mlp=parts.gated_mlp),
         rules.text_part(NEXT)),
    Like(("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"), ("qwen3_5_moe_text", "qwen3_5_moe"),
         {**_NEXT_SIZES, "num_experts": 256, "num_experts_per_tok": 8},
         partial(qwen3_next, apart=True, mlp=experts_everywhere), rules.text_part(NEXT)),
    Like(("Qwen2MoeForCausalLM",), ("qwen2_moe",),
         {**DEFAULTS, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
          "shared_expert_intermediate_size": 5632}, qwen2_moe, (*rules.QWEN_EXPERTS, *rules.LLAMA)),
    Like(("Qwen3ForCausalLM",), ("qwen3",), {**DEFAULTS, "head_dim": 128, "num_key_value_heads": 32},
         partial(llama.spec, normed="before", windows=upper_windows)),
    Like(("Qwen3MoeForCausalLM",), ("qwen3_moe",),
         {**DEFAULTS, "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts_per_tok": 8},
         partial(llama.spec, normed="before", windows=lambda config: config.windows(lambda _layer: True, _window(config)),
                 mlps=parts.some_experts), (*rules.QWEN_EXPERTS, *rules.LLAMA)))
