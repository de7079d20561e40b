"""Qwen 1.5 to 3, dense and with experts, and MiMo. Upper layers may slide. Queries, keys and values have biases in Qwen 2; in
Qwen 3 each head's query and key are normed."""

from functools import partial

from penstock.models.families import llama
from penstock.models.family import Config, Like, ModelSpec, Rule, parts, rules

ARCHITECTURES = ("Qwen2ForCausalLM", "MiMoForCausalLM")
MODEL_TYPES = ("qwen2", "mimo")
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 32768}
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


LIKE = (
    Like(("Qwen2MoeForCausalLM",), ("qwen2_moe",),
         {**DEFAULTS, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
          "shared_expert_intermediate_size": 5632}, qwen2_moe, (*rules.EXPERTS, *rules.LLAMA)),
    Like(("Qwen3ForCausalLM",), ("qwen3",), {**DEFAULTS, "head_dim": 128, "num_key_value_heads": 32},
         partial(llama.spec, normed="before", windows=upper_windows)),
    Like(("Qwen3MoeForCausalLM",), ("qwen3_moe",),
         {**DEFAULTS, "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts_per_tok": 8},
         partial(llama.spec, normed="before", windows=upper_windows, mlps=parts.some_experts), (*rules.EXPERTS, *rules.LLAMA)),
)
