"""MiniMax-M2: queries and keys normed over all heads together, partial rotation, experts by corrected sigmoids."""

from penstock.models.family import Config, ModelSpec, QueryKeyNorm, Routing, Rule, parts, rope, rules

ARCHITECTURES = ("MiniMaxM2ForCausalLM",)
MODEL_TYPES = ("minimax_m2",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 196608, "num_key_value_heads": 8, "head_dim": 128,
            "num_experts_per_tok": 8, "num_local_experts": 256}
RULES = (
    Rule("model.layers.#.block_sparse_moe.e_score_correction_bias", "blocks.#.mlp.correction"),
    *rules.MIXTRAL_EXPERTS,
    *rules.LLAMA,
)


def spec(config: Config) -> ModelSpec:
    norm, size = parts.rms_norm(config), parts.head_size(config)
    turn = rope(config, size, theta=5000000.0, fraction=config.integer("rotary_dim", size) / size)
    routing = Routing(parts.expert_count(config), config.integer("num_experts_per_tok"), "sigmoid", normalise=True,
                      corrected=True)
    attention = parts.attention(config, rope=turn, norm=QueryKeyNorm(norm, whole=True))
    return parts.uniform(config, attention, parts.experts(config, routing, inner="intermediate_size"), norm,
                         beyond=parts.draft_layers(config))
