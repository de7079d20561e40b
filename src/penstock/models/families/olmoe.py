"""OLMoE: queries and keys normed over all heads together, and experts in every layer."""

from penstock.models.family import Config, ModelSpec, QueryKeyNorm, Routing, parts, rope, rules

ARCHITECTURES = ("OlmoeForCausalLM",)
MODEL_TYPES = ("olmoe",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts": 64,
            "num_experts_per_tok": 8}
RULES = (*rules.EXPERTS, *rules.LLAMA)


def spec(config: Config) -> ModelSpec:
    config.absent("clip_qkv")
    norm, bias = parts.rms_norm(config), config.flag("attention_bias", False)
    routing = Routing(parts.expert_count(config), config.integer("num_experts_per_tok"),
                      normalise=config.flag("norm_topk_prob", False))
    turn = rope(config, parts.head_size(config))
    attention = parts.attention(config, rope=turn, norm=QueryKeyNorm(norm, whole=True), bias=bias)
    return parts.uniform(config, attention, parts.experts(config, routing, inner="intermediate_size"), norm)
