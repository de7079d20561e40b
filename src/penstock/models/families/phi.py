"""Phi-1, 1.5 and 2: parallel branches with one norm, partial rotation, biases throughout."""

from penstock.models.family import Config, HeadSpec, ModelSpec, QueryKeyNorm, Rule, parts, rope, rules

ARCHITECTURES = ("PhiForCausalLM",)
MODEL_TYPES = ("phi",)
DEFAULTS = {"hidden_act": "gelu_new", "max_position_embeddings": 2048}
RULES = (
    *Rule.named("model.layers.#.", {"self_attn.dense.*": "attention.o.*", "self_attn.q_layernorm.*": "attention.q_norm.*",
        "self_attn.k_layernorm.*": "attention.k_norm.*", "mlp.fc1.*": "mlp.up.*", "mlp.fc2.*": "mlp.down.*"}),
    Rule("model.final_layernorm.*", "norm.*"),
    Rule("lm_head.bias", "head.bias"),
    *rules.LAYER_NORM_LLAMA,
)


def spec(config: Config) -> ModelSpec:
    norm = parts.layer_norm(config)
    attention = parts.attention(config, rope=rope(config, parts.head_size(config), fraction=0.5), bias=True,
                                norm=QueryKeyNorm(norm) if config.flag("qk_layernorm", False) else None)
    return parts.layered(config, attention, parts.plain_mlp(config, bias=True), norm, same=True,
                         head=HeadSpec(config.flag("tie_word_embeddings", False), bias=True))
