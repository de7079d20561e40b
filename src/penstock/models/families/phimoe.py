"""Phi-3.5-MoE: layer norms with biases, LongRoPE, and experts picked one after another (sparsemixer)."""

from penstock.models.families import llama
from penstock.models.family import Config, HeadSpec, LayerNormSpec, ModelSpec, Routing, Rule, parts, rules

ARCHITECTURES = ("PhimoeForCausalLM", "PhiMoEForCausalLM")
MODEL_TYPES = ("phimoe",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 4096 * 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 2, "num_local_experts": 16, "router_jitter_noise": 0.01}
RULES = (
    *rules.MIXTRAL_EXPERTS,
    Rule("model.layers.#.input_layernorm.bias", "blocks.#.attention.pre.bias"),
    Rule("model.layers.#.post_attention_layernorm.bias", "blocks.#.mlp.pre.bias"),
    Rule("model.norm.bias", "norm.bias"),
    Rule("lm_head.bias", "head.bias"),
    *rules.LLAMA,
)


def spec(config: Config) -> ModelSpec:
    if config.integer("num_experts_per_tok") != 2:
        raise config.wrong("num_experts_per_tok", "2: experts are picked and weighted in pairs")
    routing = Routing(parts.expert_count(config), 2, "sparsemixer", jitter=config.number("router_jitter_noise"))
    mixture = parts.experts(config, routing, inner="intermediate_size")
    return llama.spec(_one_scale(config), norm=lambda config: LayerNormSpec(config.number("rms_norm_eps")), theta=1000000.0,
                      mlps=lambda _config: mixture, windows=llama.slides(width=0),
                      head=HeadSpec(config.flag("tie_word_embeddings", False), bias=config.flag("lm_head_bias", False)))


def _one_scale(config: Config) -> Config:
    """With the amplitude of the rotation under the usual key; it is the same for short and long contexts in all checkpoints."""
    name = "rope_parameters" if "rope_parameters" in config.values else "rope_scaling"
    given = config.values.get(name)
    if not isinstance(given, dict) or "short_mscale" not in given:
        return config
    if given["short_mscale"] != given.get("long_mscale"):
        raise config.wrong(name, "equal short_mscale and long_mscale")
    scaled = {key: value for key, value in given.items() if not key.endswith("_mscale")}
    return Config({**config.given, name: {**scaled, "attention_factor": given["short_mscale"]}}, DEFAULTS)
