"""Gemma 3n, text only: several streams of which layers compute with one, a low-rank branch beside attention, cut gates; and as
in Gemma 4, inputs of single layers, normed values and shared keys. Of a checkpoint with towers the text part is used."""

from dataclasses import replace
from statistics import NormalDist

from penstock.models import family
from penstock.models.families import gemma, gemma4
from penstock.models.family import BranchSpec, Config, ModelSpec, Rule, StreamsSpec, parts, rules

ARCHITECTURES = ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration")
MODEL_TYPES = ("gemma3n_text", "gemma3n")
DEFAULTS = {
    **gemma4.DEFAULTS, "vocab_size": 262400, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 35,
    "num_key_value_heads": 2, "max_position_embeddings": 32768, "num_kv_shared_layers": 15, "laurel_rank": 64,
    "altup_num_inputs": 4, "rope_parameters": None}
RULES = rules.text_part((
    Rule("model.altup_projections.@.weight", "streams.entry.@.weight"),
    Rule("model.altup_unembed_projections.@.weight", "streams.exit.@.weight"),
    *Rule.named("model.layers.#.", {
        "altup.router_norm.weight": "streams.norm", "altup.modality_router.weight": "streams.router",
        "altup.prediction_coefs.weight": "streams.predict", "altup.correction_coefs.weight": "streams.correct",
        "altup.correct_output_scale": "streams.scale", "laurel.linear_left.*": "laurel.up.*",
        "laurel.linear_right.*": "laurel.down.*", "laurel.post_laurel_norm.weight": "laurel.post.weight"}),
    *gemma4.INPUTS, *rules.EMBEDDING, *rules.ATTENTION, *rules.MLP, *rules.SANDWICH_NORMS))


def _inner(config: Config) -> list[int]:
    """The inner width of each layer, which configs state once or in a list."""
    layers, given = config.integer("num_hidden_layers"), config.values["intermediate_size"]
    if not isinstance(given, list):
        return [config.integer("intermediate_size")] * layers
    return config.listing("intermediate_size", layers, lambda one: isinstance(one, int) and one > 0, "a whole number") or []


def spec(config: Config) -> ModelSpec:
    norm, width, layers = parts.rms_norm(config), config.integer("hidden_size"), config.integer("num_hidden_layers")
    kinds = config.layers("layer_types", "full_attention", "sliding_attention", lambda layer: (layer + 1) % 5 != 0)
    cuts = config.listing("activation_sparsity_pattern", layers, lambda one: isinstance(one, int | float) and 0 <= one < 1,
                          "a share below 1") or [0.95 if layers > 10 and layer < 10 else 0.0 for layer in range(layers)]
    near, far = gemma.ropes(config)
    streams = StreamsSpec(width, config.integer("altup_num_inputs", least=2), config.integer("altup_active_idx", 0, least=0),
                          norm.eps, config.flag("altup_correct_scale", True))
    if streams.active >= streams.count:
        raise config.wrong("altup_active_idx", f"a number below altup_num_inputs ({streams.count})")
    laurel = BranchSpec(family.MLPSpec(width, config.integer("laurel_rank"), "none", gated=False, name="laurel"), post=norm,
                        same=True, keeps=True)
    blocks = []
    for sliding, reads, inner, cut in zip(kinds, gemma4.sources(config, kinds), _inner(config), cuts, strict=True):
        attention = gemma4.attention(config, near if sliding else far, sliding=sliding, reads=reads, factor=0.5**0.5)
        mlp = parts.gated_mlp(config.changed(intermediate_size=inner), activation="hidden_activation")
        mlp = replace(mlp, cut=(NormalDist().inv_cdf(cut), inner) if cut else None)
        blocks.append(family.BlockSpec(((attention, laurel), (BranchSpec(mlp, norm, norm),), (gemma4.given(config),)),
                                       streams=streams))
    return replace(gemma4.model(config, blocks, 30.0), streams=streams)
