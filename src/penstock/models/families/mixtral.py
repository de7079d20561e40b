"""Mixtral: Mistral with experts, whose weights are normalised over the picked ones."""

from penstock.models.family import Config, ModelSpec, Routing, parts, rope, rules

ARCHITECTURES = ("MixtralForCausalLM",)
MODEL_TYPES = ("mixtral",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 4096 * 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 2, "num_local_experts": 8}
RULES = (*rules.MIXTRAL_EXPERTS, *rules.LLAMA)


def spec(config: Config) -> ModelSpec:
    norm, turn = parts.rms_norm(config), rope(config, parts.head_size(config), theta=1000000.0)
    routing = Routing(parts.expert_count(config), config.integer("num_experts_per_tok"), normalise=True)
    attention = parts.attention(config, rope=turn, window=config.nullable_integer("sliding_window", 0))
    return parts.uniform(config, attention, parts.experts(config, routing, inner="intermediate_size"), norm)
