"""OLMo 2 and 3, EXAONE 4: norms after each branch, in K-EXAONE before. Queries and keys are normed, OLMo's over all heads."""

from dataclasses import replace
from typing import Any

from penstock.models.families import llama
from penstock.models.family import Config, Like, ModelSpec, RopeScaling, Rule, parts, rope, rules

ARCHITECTURES = ("Olmo2ForCausalLM",)
MODEL_TYPES = ("olmo2",)
DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
RULES = (*rules.EMBEDDING, *rules.ATTENTION, *rules.MLP, *Rule.named("model.layers.#.", {
    "post_attention_layernorm.weight": "attention.post.weight", "post_feedforward_layernorm.weight": "mlp.post.weight"}))


def spec(config: Config) -> ModelSpec:
    return llama.spec(config, normed="whole", pre=False, post=True)


def olmo3(config: Config) -> ModelSpec:
    """Layers slide but every fourth; scaled rotations are those of full layers alone."""
    size, given = parts.head_size(config), config.values.get("rope_parameters")
    far = rope(config, size, layer_type="full_attention", theta=500000.0)
    nested = isinstance(given, dict) and "sliding_attention" in given
    near = rope(config, size, layer_type="sliding_attention", theta=500000.0) if nested else replace(far, scaling=RopeScaling())
    return llama.spec(config, normed="whole", turn=near, full={"rope": far}, pre=False, post=True,
                      windows=llama.slides(lambda layer: (layer + 1) % 4 != 0),
                      max_positions=far.scaling.reach(config.integer("max_position_embeddings")))


def exaone4(config: Config, **more: Any) -> ModelSpec:
    """If some layers slide, the others do not rotate. `sliding_window_pattern`: "LLLG", or every n-th layer is global."""
    layers, pattern = config.integer("num_hidden_layers"), config.values.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):
        local = [pattern[i % len(pattern)] == "L" and i < layers - 1 for i in range(layers)]
    else:
        local = [bool(pattern) and (i + 1) % pattern != 0 for i in range(layers)]
    return llama.spec(config, normed="before", windows=llama.slides(local.__getitem__),
                      full={"rope": None} if config.nullable_integer("sliding_window", 4096) else {},
                      **more or {"pre": False, "post": True})


LIKE = (
    Like(("Olmo3ForCausalLM",), ("olmo3",), DEFAULTS, olmo3, RULES),
    Like(("ExaoneMoeForCausalLM",), ("exaone_moe",),
         {**DEFAULTS, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 1024, "num_shared_experts": 1,
          "first_k_dense_replace": 1, "routed_scaling_factor": 2.5},
         lambda config: exaone4(config.renamed(num_shared_experts="n_shared_experts"), mlps=parts.dense_then_experts),
         (Rule("mtp.**", None), Rule("model.layers.#.mlp.e_score_correction_bias", "blocks.#.mlp.correction"), *rules.EXPERTS,
          *rules.LLAMA)),
    Like(("Exaone4ForCausalLM",), ("exaone4",), {**DEFAULTS, "num_key_value_heads": 32}, exaone4, RULES))
