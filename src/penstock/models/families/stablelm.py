"""StableLM: Llama with LayerNorms and partial rotation, perhaps with parallel branches and normed heads."""

from penstock.models.families import llama
from penstock.models.family import Config, ModelSpec, QueryKeyNorm, Rule, parts, rules

ARCHITECTURES = ("StableLmForCausalLM", "StableLMEpochForCausalLM")
MODEL_TYPES = ("stablelm", "stablelm_epoch")
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 4096}
RULES = (
    Rule("model.layers.#.self_attn.q_layernorm.norms.*.weight", "blocks.#.attention.q_norm.*.weight"),
    Rule("model.layers.#.self_attn.k_layernorm.norms.*.weight", "blocks.#.attention.k_norm.*.weight"),
    *rules.LAYER_NORM_LLAMA,
)


def spec(config: Config) -> ModelSpec:
    normed = QueryKeyNorm(parts.layer_norm(config, bias=False), own=True) if config.flag("qk_layernorm", False) else None
    return llama.spec(config.changed(attention_bias=config.flag("use_qkv_bias", False), attention_out_bias=False),
                      norm=parts.layer_norm, fraction=0.25, attends={"norm": normed},
                      same=config.flag("use_parallel_residual", False))
