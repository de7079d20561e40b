"""Granite 3 MoE: Granite with experts, chosen by logits and weighted by a softmax over the chosen; perhaps a shared one."""

from penstock.models.family import Config, EmbeddingSpec, HeadSpec, ModelSpec, Routing, Rule, parts, rope, rules

ARCHITECTURES = ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM")
MODEL_TYPES = ("granitemoe", "granitemoeshared")
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2}
RULES = (
    Rule("model.layers.#.block_sparse_moe.router.[layer.]weight", "blocks.#.mlp.router.weight"),
    Rule("model.layers.#.block_sparse_moe.input_linear.weight", "blocks.#.mlp.experts.gate_up.weight", rules.stacked),
    Rule("model.layers.#.block_sparse_moe.output_linear.weight", "blocks.#.mlp.experts.down.weight", rules.stacked),
    Rule("model.layers.#.shared_mlp.input_linear.weight", "blocks.#.mlp.shared.gate_up.weight"),
    Rule("model.layers.#.shared_mlp.output_linear.weight", "blocks.#.mlp.shared.down.weight"),
    *rules.LLAMA,
)


def spec(config: Config) -> ModelSpec:
    norm, bias = parts.rms_norm(config), config.flag("attention_bias", False)
    turn = rope(config, parts.head_size(config))
    attention = parts.attention(config, rope=turn, bias=bias, scale=config.number("attention_multiplier", 1.0))
    routing = Routing(parts.expert_count(config), config.integer("num_experts_per_tok"), "softmax_after")
    mixture = parts.experts(config, routing, inner="intermediate_size",
                            shared_inner=config.integer("shared_intermediate_size", 0, least=0))
    block = parts.pre_norm_block(attention, mixture, norm, scale=config.number("residual_multiplier", 1.0))
    return parts.decoder(config, [block] * config.integer("num_hidden_layers"), norm,
                         embedding=EmbeddingSpec(config.number("embedding_multiplier", 1.0)),
                         head=HeadSpec(config.flag("tie_word_embeddings", False), divisor=config.number("logits_scaling", 1.0)))
