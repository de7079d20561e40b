"""Granite 3: Llama with a multiplier on the embedding, the scores, every branch and the logits. Granite MoE has experts, chosen
by logits and weighted by a softmax over the chosen, and perhaps a shared one."""

from collections.abc import Callable
from functools import partial

from penstock.models.families import llama
from penstock.models.family import Config, EmbeddingSpec, HeadSpec, Like, MixerSpec, ModelSpec, Rule, parts, rules

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


def spec(config: Config, *, mlps: Callable[[Config], MixerSpec] | None = None) -> ModelSpec:
    return llama.spec(config, mlps=mlps, attends={"scale": config.number("attention_multiplier", 1.0)},
                      scale=config.number("residual_multiplier", 1.0),
                      embedding=EmbeddingSpec(config.number("embedding_multiplier", 1.0)),
                      head=HeadSpec(config.flag("tie_word_embeddings", False), divisor=config.number("logits_scaling", 1.0)))


def _experts(config: Config) -> MixerSpec:
    return parts.experts(config, parts.routing(config, "softmax_after"), inner="intermediate_size",
                         shared_inner=config.integer("shared_intermediate_size", 0, least=0))


LIKE = (Like(("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"), ("granitemoe", "granitemoeshared"),
             {**DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2}, partial(spec, mlps=_experts), MIXTURE),)
