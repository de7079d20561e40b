"""Gemma 4, text only: heads of full layers have another size than those of sliding ones, values are normed, the last layers
may read the keys and values of earlier ones, layers may have inputs of their own and experts beside the dense network. Of a
checkpoint with vision and sound the text part is used."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.models import family
from penstock.models.family import BranchSpec, Config, Like, ModelSpec, RopeSpec, Rule, parts, rope, rules

ARCHITECTURES = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")
MODEL_TYPES = ("gemma4_text", "gemma4")
DEFAULTS = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072,
    "sliding_window": 512, "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256, "rope_parameters": {
        "sliding_attention": {"rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0}}}
INPUTS = (
    Rule("model.embed_tokens_per_layer.weight", "inputs.table.weight"),
    Rule("model.per_layer_model_projection.*", "inputs.projection.*"),
    Rule("model.per_layer_projection_norm.weight", "inputs.norm.weight"),
    *Rule.named("model.layers.#.", {"per_layer_input_gate.*": "inputs.up.*", "per_layer_projection.*": "inputs.down.*",
        "post_per_layer_input_norm.weight": "inputs.post.weight"}))
"""Inputs of single layers."""
RULES = rules.text_part((
    *Rule.named("model.layers.#.", {"layer_scalar": "factor", "router.proj.*": "mixture.router.*",
        "router.scale": "mixture.router_norm.weight", "router.per_expert_scale": "mixture.factors",
        "experts.gate_up_proj": ("mixture.experts.gate_up.weight", rules.stacked),
        "experts.down_proj": ("mixture.experts.down.weight", rules.stacked),
        **rules.projections("experts.@", "mixture.experts.@"),
        "pre_feedforward_layernorm_2.weight": "mixture.experts_norm.weight",
        "post_feedforward_layernorm_1.weight": "mlp.post.weight", "post_feedforward_layernorm_2.weight": "mixture.post.weight",
        "post_feedforward_layernorm.weight": "mlp.joint.weight"}),
    *INPUTS, *rules.EMBEDDING, *rules.ATTENTION, *rules.MLP, *rules.SANDWICH_NORMS))


def sources(config: Config, kinds: Sequence[bool]) -> list[int | None]:
    """The layer whose keys and values each reads, None for its own: the last `num_kv_shared_layers` those of the last layer of
    their kind before them."""
    shared = config.integer("num_kv_shared_layers", 0, least=0)
    own = len(kinds) - shared
    if not all(kind in kinds[:max(0, own)] for kind in kinds):
        raise config.wrong("num_kv_shared_layers", "a number that leaves a layer of each kind with its own keys and values")
    return [None if layer < own else max(i for i in range(own) if kinds[i] == kind) for layer, kind in enumerate(kinds)]


def attention(config: Config, rope: RopeSpec, *, sliding: bool, reads: int | None, **more: Any) -> BranchSpec:
    """Queries, keys and values are normed, scores not scaled. `more`: of the branch."""
    norm, both = parts.rms_norm(config), config.flag("attention_k_eq_v", False) and not sliding and reads is None
    return BranchSpec(parts.attention(
        config, rope=rope, scale=1.0, bias=config.flag("attention_bias", False), norm=family.QueryKeyNorm(norm), reads=reads,
        value_eps=norm.eps, window=config.integer("sliding_window") if sliding else 0, keys_only=both), norm, norm, **more)


def model(config: Config, blocks: Sequence[family.BlockSpec], softcap: float) -> ModelSpec:
    """Of these layers, perhaps with inputs by `hidden_size_per_layer_input` (0: without) and `vocab_size_per_layer_input`.
    `softcap`: of logits, if the config does not say."""
    norm, capped = parts.rms_norm(config), config.nullable_number("final_logit_softcapping", softcap)
    inputs = family.LayerInputsSpec(config.integer("hidden_size_per_layer_input", least=0), len(blocks),
                                    config.integer("vocab_size_per_layer_input"), norm)
    embedding = family.EmbeddingSpec(config.integer("hidden_size")**0.5, True, layers=inputs if inputs.size else None)
    return parts.decoder(config, blocks, norm, embedding=embedding, max_positions=config.integer("max_position_embeddings"),
                         head=family.HeadSpec(config.flag("tie_word_embeddings", True), softcap=capped))


def given(config: Config, **more: Any) -> BranchSpec:
    """The branch by which a layer reads an input of its own. `more`: other fields."""
    inner = config.integer("hidden_size_per_layer_input")
    mlp = parts.gated_mlp(config.changed(intermediate_size=inner), activation="hidden_activation")
    return BranchSpec(replace(mlp, gated=False, given=True, name="inputs"), post=parts.rms_norm(config), **more)


def _overrides(config: Config, kinds: Sequence[bool]) -> dict[int, dict[str, Any]]:
    """Values that layers have otherwise than the config says, by their numbers: `per_layer_config`, as transformers writes it,
    or those of full layers, as published."""
    full = {"head_dim": config.integer("global_head_dim", 512)}
    if config.flag("attention_k_eq_v", False) and "num_global_key_value_heads" in config.values:
        full["num_key_value_heads"] = config.integer("num_global_key_value_heads")
    found = config.values.get("per_layer_config", {str(i): full for i, sliding in enumerate(kinds) if not sliding})
    if not isinstance(found, dict) or not all(name.isdecimal() and isinstance(one, dict) for name, one in found.items()):
        raise config.wrong("per_layer_config", "an object of objects, by the numbers of layers")
    return {int(number): one for number, one in found.items()}  # transformers writes "05" where there are 10 layers or more


def spec(config: Config) -> ModelSpec:
    if config.values.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise config.wrong("use_bidirectional_attention", "null or vision: tokens of texts see none behind them")
    norm, named = parts.rms_norm(config), "hidden_activation"
    kinds = config.layers("layer_types", "full_attention", "sliding_attention", lambda layer: (layer + 1) % 6 != 0)
    kinds[-1] = False  # whatever the config says, as in transformers
    others, wide, blocks = _overrides(config, kinds), 1 + config.flag("use_double_wide_mlp", False), []
    for layer, (sliding, reads) in enumerate(zip(kinds, sources(config, kinds), strict=True)):
        own = config.changed(**others.get(layer, {}))
        turn = rope(own, parts.head_size(own), layer_type="sliding_attention" if sliding else "full_attention")
        mlp = parts.gated_mlp(own, activation=named)
        mlp = mlp if reads is None else replace(mlp, inner=wide * mlp.inner)
        behind = [(given(config, factor=0.0),)] if config.integer("hidden_size_per_layer_input", least=0) else []
        forward = [BranchSpec(mlp, norm, joint=norm, factor=1.0 if behind else 0.0)]
        if config.flag("enable_moe_block", False):
            routing = family.Routing(config.integer("num_experts"), config.integer("top_k_experts"), normalise=True)
            mixture = replace(parts.experts(own, routing, activation=named), norm=norm, name="mixture")
            forward = [replace(forward[0], post=norm), BranchSpec(mixture, post=norm)]
        blocks.append(family.BlockSpec(((attention(own, turn, sliding=sliding, reads=reads),), tuple(forward), *behind)))
    return model(config, blocks, 0.0)


LIKE = (
    Like(("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"), ("gemma4_unified_text", "gemma4_unified"),
         {**DEFAULTS, "max_position_embeddings": 262144, "sliding_window": 1024, "hidden_size_per_layer_input": 0}, spec,
         RULES),)
