"""Persimmon: queries, keys and values merged by head, normed heads, squared ReLUs."""

from penstock.models.families import llama
from penstock.models.family import Config, ModelSpec, Rule, interleaved, parts, rules

ARCHITECTURES = ("PersimmonForCausalLM",)
MODEL_TYPES = ("persimmon",)
DEFAULTS = {"hidden_act": "relu2", "max_position_embeddings": 16384, "attention_bias": True, "mlp_bias": True}
RULES = (
    *Rule.named("model.layers.#.", {"self_attn.query_key_value.*": ("attention.qkv.*", interleaved),
        "self_attn.dense.*": "attention.o.*", "self_attn.q_layernorm.*": "attention.q_norm.*",
        "self_attn.k_layernorm.*": "attention.k_norm.*", "mlp.dense_h_to_4h.*": "mlp.up.*",
        "mlp.dense_4h_to_h.*": "mlp.down.*"}),
    Rule("model.final_layernorm.*", "norm.*"),
    *rules.LAYER_NORM_LLAMA,
)


def spec(config: Config) -> ModelSpec:
    return llama.spec(config, norm=parts.layer_norm, mlp=parts.plain_mlp, theta=25000.0, fraction=0.5,
                      normed="before" if config.flag("qk_layernorm", True) else "")
