"""Granite 3: Llama with a multiplier on the embedding, the scores, every branch and the logits. Granite MoE has experts, chosen
by logits and weighted by a softmax over the chosen, and perhaps a shared one."""

from functools import partial

from penstock.models.family import Config, EmbeddingSpec, HeadSpec, Like, MixerSpec, ModelSpec, Rule, parts, rope, rules

ARCHITECTURES = ("GraniteForCausalLM",)
MODEL_TYPES = ("granite",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 2048}
RULES = rules.LLAMA
MIXTURE = (
    Rule("model.layers.#.block_sparse_moe.router.[layer.]weight", "blocks.#.mlp.router.weight"),
    Rule("model.layers.#.block_sparse_moe.input_linear.weight", "blocks.#.mlp.experts.gate_up.weight", rules.stacked),
    Rule("model.layers.#.block_sparse_moe.output_linear.weight", "blocks.#.mlp.experts.down.weight", rules.stacked),
    Rule("model.layers.#.shared_mlp.input_linear.weight", "blocks.#.mlp.shared.gate_up.weight"),
    Rule("model.layers.#.shared_mlp.output_linear.weight", "blocks.#.mlp.shared.down.weight"),
    *rules.LLAMA,
)


def spec(config: Config, *, sparse: bool = False) -> ModelSpec:
    attention = parts.attention(config, rope=rope(config, parts.head_size(config)), bias=config.flag("attention_bias", False),
                                scale=config.number("attention_multiplier", 1.0))
    mlp: MixerSpec = parts.gated_mlp(config, bias=config.flag("mlp_bias", False))
    if sparse:
        mlp = parts.experts(config, parts.routing(config, "softmax_after"), inner="intermediate_size",
                            shared_inner=config.integer("shared_intermediate_size", 0, least=0))
    return parts.layered(config, attention, mlp, parts.rms_norm(config), scale=config.number("residual_multiplier", 1.0),
                         embedding=EmbeddingSpec(config.number("embedding_multiplier", 1.0)),
                         head=HeadSpec(config.flag("tie_word_embeddings", False), divisor=config.number("logits_scaling", 1.0)))


LIKE = (Like(("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"), ("granitemoe", "granitemoeshared"),
             {**DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2}, partial(spec, sparse=True), MIXTURE),)
