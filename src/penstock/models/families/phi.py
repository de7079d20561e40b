"""Phi-1, 1.5 and 2: parallel branches with one norm, partial rotation, biases throughout. Phi-3 (mini, medium) and Phi-4 (mini
and the 14B): Llama with merged matrices, partial rotation and LongRoPE."""

from penstock.models.families import llama
from penstock.models.family import Config, HeadSpec, Like, ModelSpec, Rule, parts, rope, rules

ARCHITECTURES = ("PhiForCausalLM",)
MODEL_TYPES = ("phi",)
DEFAULTS = {"hidden_act": "gelu_new", "max_position_embeddings": 2048, "attention_bias": True, "mlp_bias": True}
RULES = (
    *Rule.named("model.layers.#.", {"self_attn.dense.*": "attention.o.*", "self_attn.q_layernorm.*": "attention.q_norm.*",
        "self_attn.k_layernorm.*": "attention.k_norm.*", "mlp.fc1.*": "mlp.up.*", "mlp.fc2.*": "mlp.down.*"}),
    Rule("model.final_layernorm.*", "norm.*"),
    Rule("lm_head.bias", "head.bias"),
    *rules.LAYER_NORM_LLAMA,
)
PHI3 = (
    *rules.EMBEDDING,
    *rules.PRE_NORMS,
    *Rule.named("model.layers.#.", {"self_attn.qkv_proj.weight": "attention.qkv.weight",
        "self_attn.o_proj.weight": "attention.o.weight", "self_attn.rotary_emb.inv_freq": None,
        "mlp.gate_up_proj.weight": "mlp.gate_up.weight", "mlp.down_proj.weight": "mlp.down.weight"}),
)


def spec(config: Config) -> ModelSpec:
    return llama.spec(config, norm=parts.layer_norm, mlp=parts.plain_mlp, fraction=0.5, same=True,
                      normed="before" if config.flag("qk_layernorm", False) else "",
                      head=HeadSpec(config.flag("tie_word_embeddings", False), bias=True))


def phi3(config: Config) -> ModelSpec:
    config.absent("attention_bias")
    return llama.spec(config, turn=rope(config, parts.head_size(config), aliases={"su": "longrope", "yarn": "longrope"}),
                      windows=llama.slides(width=0))


LIKE = (Like(("Phi3ForCausalLM",), ("phi3",),
             {"hidden_act": "silu", "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
              "rms_norm_eps": 1e-5}, phi3, PHI3),)
