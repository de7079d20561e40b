"""InternLM 2 and 3: Llama; InternLM 2 stores queries, keys and values of each group of heads together."""

from penstock.models.families import llama
from penstock.models.family import Config, ModelSpec, Rule, by_group, rules

ARCHITECTURES = ("InternLM2ForCausalLM", "InternLM3ForCausalLM")
MODEL_TYPES = ("internlm2", "internlm3")
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-5}
RULES = (
    *rules.LLAMA,
    Rule("model.tok_embeddings.weight", "embedding.weight"),
    Rule("output.weight", "head.weight"),
    *Rule.named("model.layers.#.", {"attention.wqkv.*": ("attention.qkv.*", by_group), "attention.wo.*": "attention.o.*",
        "attention_norm.weight": "attention.pre.weight", "feed_forward.w1.*": "mlp.gate.*", "feed_forward.w3.*": "mlp.up.*",
        "feed_forward.w2.*": "mlp.down.*", "ffn_norm.weight": "mlp.pre.weight"}),
)


def spec(config: Config) -> ModelSpec:
    whole = next((config.flag(name, False) for name in ("bias", "mlp_bias") if name in config.values), False)
    bias = next((config.flag(name, False) for name in ("qkv_bias", "attention_bias") if name in config.values), whole)
    return llama.spec(config.changed(attention_bias=bias, attention_out_bias=whole,
                                     mlp_bias=whole and config.named("InternLM3ForCausalLM", "internlm3")))
