"""Mixtral, and in `LIKE` other mixtures of experts whose layers are Llama's otherwise."""

from dataclasses import replace
from functools import partial
from typing import Any

from penstock.models import family
from penstock.models.families import llama, olmo
from penstock.models.family import Config, Like, MixerSpec, ModelSpec, Routing, Rule, parts, rope, rules

ARCHITECTURES = ("MixtralForCausalLM",)
MODEL_TYPES = ("mixtral",)
DEFAULTS = {"max_position_embeddings": 4096 * 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "num_experts_per_tok": 2,
            "num_local_experts": 8}
RULES = (*rules.MIXTRAL_EXPERTS, *rules.LLAMA)
EXPERTS = (*rules.EXPERTS, *rules.LLAMA)


def _experts(config: Config, score: str = "softmax", *, normalise: bool = True, corrected: bool = False) -> MixerSpec:
    """The experts of every layer. `normalise`: a token's weights are, over the picked ones."""
    routing = parts.routing(config, score, normalise=normalise, corrected=corrected)
    return parts.experts(config, routing, inner="intermediate_size")


def spec(config: Config) -> ModelSpec:
    return llama.spec(config, mlps=_experts, theta=1000000.0, windows=llama.slides(width=0))


def olmoe(config: Config, **more: Any) -> ModelSpec:
    """Queries and keys are normed over all heads together."""
    config.absent("clip_qkv")
    return llama.spec(config, mlps=partial(_experts, normalise=config.flag("norm_topk_prob", False)), normed="whole", **more)


def minimax_m2(config: Config) -> ModelSpec:
    """The same, and partial rotation, and experts by corrected sigmoids."""
    size = parts.head_size(config)
    return llama.spec(config, mlps=partial(_experts, score="sigmoid", corrected=True), theta=5000000.0, normed="whole",
                      fraction=config.integer("rotary_dim", size) / size, beyond=parts.draft_layers(config))


def glm4_moe(config: Config, fraction: float = 0.5, theta: float = 10000.0) -> ModelSpec:
    """GLM-4.5, 4.6 and 4.7: dense layers first, then experts by corrected sigmoids in groups, and a shared one."""
    return llama.spec(config, mlps=parts.dense_then_experts, normed="before" if config.flag("use_qk_norm", False) else "",
                      fraction=fraction, theta=theta, beyond=parts.draft_layers(config))


def sarvam(config: Config) -> ModelSpec:
    """Sarvam 30B: the same, whose heads rotate wholly."""
    return glm4_moe(config.renamed(num_shared_experts="n_shared_experts", use_qkv_bias="attention_bias"), 1.0, 8000000.0)


def hunyuan3(config: Config) -> ModelSpec:
    """The same without groups."""
    names = {"num_shared_experts": "n_shared_experts", "router_scaling_factor": "routed_scaling_factor"}
    mlps = partial(parts.dense_then_experts, bias=config.flag("mlp_bias", False))
    return llama.spec(config.renamed(**names).changed(norm_topk_prob=True), mlps=mlps, normed="before",
                      theta=11158840.0, beyond=parts.draft_layers(config))


def kolibri1(config: Config) -> ModelSpec:
    """Norms before and after branches; every fifth layer has neither a window nor rotation. Corrected logits pick experts."""
    routing = parts.routing(config, "sigmoid_after", normalise=config.flag("norm_topk_prob", False), corrected=True)
    mixture = parts.experts(config, routing, shared_inner=config.integer("shared_expert_intermediate_size"))
    return llama.spec(config, mlps=lambda _config: mixture, normed="before", post=True, full={"rope": None},
                      windows=llama.slides(lambda layer: (layer + 1) % 5 != 0, 513))


def mellum(config: Config) -> ModelSpec:
    """Qwen 3's layers; those with a window, if there are any, rotate in their own way."""
    far, near = (rope(config, parts.head_size(config), layer_type=kind, theta=theta) for kind, theta in (
        ("full_attention", 500000.0), ("sliding_attention", 10000.0)))
    routing = partial(parts.routing, normalise=config.flag("norm_topk_prob", True))
    return llama.spec(config, mlps=partial(parts.dense_then_experts, routing=routing), normed="before", turn=near,
                      full={"rope": far}, windows=llama.slides(lambda _layer: False, 1024),
                      max_positions=far.scaling.reach(config.integer("max_position_embeddings")))


def flint(config: Config) -> ModelSpec:
    """Sinks, rotation in sliding layers alone, experts by sigmoids beside a shared one."""
    last, shared = config.integer("num_hidden_layers") - 1, config.integer("shared_expert_intermediate_size")
    return llama.spec(config, mlps=partial(parts.some_experts, score="sigmoid", shared_inner=shared), normed="before",
                      attends={"sinks": True}, full={"rope": None},
                      windows=llama.slides(lambda layer: 2 <= layer < last and layer % 4 != 1, 513))


def dots1(config: Config) -> ModelSpec:
    """dots.llm1: the same, with normed queries and keys, and windows in the upper layers."""
    first = config.integer("max_window_layers", 62)
    return llama.spec(config, mlps=parts.dense_then_experts, normed="before",
                      windows=llama.slides(lambda layer: layer >= first))


def afmoe(config: Config) -> ModelSpec:
    """Trinity: attention whose results are gated, rotation in sliding layers alone, norms around each branch."""
    config.absent("attention_bias")
    every, scale = config.integer("global_attn_every_n_layers", 4), config.integer("hidden_size") ** 0.5
    return llama.spec(config, normed="before", attends={"gate": True}, full={"rope": None}, mlps=_afmoe_mlps, post=True,
                      windows=llama.slides(lambda layer: (layer + 1) % every != 0, 1024),
                      embedding=family.EmbeddingSpec(scale if config.flag("mup_enabled", False) else 1.0))


def _afmoe_mlps(config: Config) -> list[MixerSpec]:
    """Dense layers first."""
    if config.integer("n_group", 1) != 1 or config.integer("topk_group", 1) != 1:
        raise config.wrong("n_group", "1: experts in groups are not there")
    routing = partial(parts.routing, score="sigmoid", normalise=True, scale=config.number("route_scale", 1.0), corrected=True)
    names = {"num_dense_layers": "first_k_dense_replace", "num_shared_experts": "n_shared_experts"}
    return parts.dense_then_experts(config.renamed(**names), routing)


def _granite_experts(config: Config) -> MixerSpec:
    """Chosen by logits and weighted by a softmax over the chosen; perhaps with a shared one."""
    return parts.experts(config, parts.routing(config, "softmax_after"), inner="intermediate_size",
                         shared_inner=config.integer("shared_intermediate_size", 0, least=0))


def cohere2(config: Config) -> ModelSpec:
    """Command A's layers; experts may be averaged with shared ones, and dense layers come first, which may all slide."""
    first = config.integer("first_k_dense_replace", 0, least=0)
    near, every = config.integer("prefix_dense_sliding_window_pattern", 1), config.integer("sliding_window_pattern", 4)
    windows = config.windows(lambda layer: (layer + 1) % near != 0 if layer < first else (layer + 1 - first) % every != 0,
                             config.integer("sliding_window", 4096))
    norm = parts.rms_norm(config) if "rms_norm_eps" in config.values else parts.layer_norm(config, bias=False)
    wide, shared = config.integer("intermediate_size"), config.integer("num_shared_experts", 0, least=0)
    score = config.choice("expert_selection_fn", {"softmax": "softmax_after", "sigmoid": "sigmoid_after"})
    routing = partial(parts.routing, score=score, normalise=score == "sigmoid_after" and config.flag("norm_topk_prob", True))
    config = config.changed(moe_intermediate_size=wide, n_shared_experts=shared,
                            intermediate_size=config.integer("prefix_dense_intermediate_size", wide))
    halved = config.choice("shared_expert_combination_strategy", {"average": "half", "sum": ""}) and shared
    attention = parts.attention(config, rope=rope(config, parts.head_size(config), interleaved=True),
                                bias=config.flag("attention_bias", False))
    blocks = []
    for window, mlp in zip(windows, parts.dense_then_experts(config, routing), strict=True):
        dense = isinstance(mlp, family.MLPSpec)
        turned = replace(attention, window=window, rope=attention.rope if window or (dense and near == 1) else None)
        blocks.append(family.BlockSpec(((family.BranchSpec(turned, norm), family.BranchSpec(
            mlp, same=True, scale=0.5 if halved and not dense else 1.0)),)))
    return parts.decoder(config, blocks, norm, head=family.HeadSpec(
        config.flag("tie_word_embeddings", True), divisor=1.0 / config.number("logit_scale", 0.0625)))


def ernie4_5(config: Config) -> ModelSpec:
    """Interleaved rotation, experts by corrected softmax from some layer on, and shared ones."""
    bias, layers = config.flag("use_bias", False), config.integer("num_hidden_layers")
    config = llama.biased(config, False).renamed(moe_k="num_experts_per_tok")
    routing = parts.routing(config, normalise=True, corrected=True, least=config.number("moe_norm_min", 1e-12))
    shared = config.integer("moe_num_shared_experts", least=0) * config.integer("moe_intermediate_size")
    mixture = replace(parts.experts(config, routing, shared_inner=shared), shared_bias=bias)
    first, last = (config.integer(f"moe_layer_{end}_index", least=-1) for end in ("start", "end"))
    chosen, every = range(first, (last if last >= 0 else layers - 1) + 1), config.integer("moe_layer_interval", 1)
    mlp = parts.gated_mlp(config, bias=bias)
    mlps = [mixture if i in chosen and (i + 1) % every == 0 else mlp for i in range(layers)]
    head = family.HeadSpec(config.flag("tie_word_embeddings", True), bias=bias)
    return llama.spec(config, mlps=lambda _config: mlps, theta=500000.0, interleaved=True, head=head)


def hunyuan(config: Config) -> ModelSpec:
    """Hunyuan 1 (A13B): queries and keys are normed after the rotation; experts beside a shared one in every layer."""
    return llama.spec(_with_theta(config), normed="after", mlps=_hunyuan_mlps)


def _hunyuan_mlps(config: Config) -> list[MixerSpec]:
    wide, experts = config.integer("intermediate_size"), parts.expert_count(config)
    numbers = (_of_each(config, name, default) for name, default in (
        ("moe_topk", 1), ("num_shared_expert", 1), ("moe_intermediate_size", wide)))
    return [parts.experts(config.changed(moe_intermediate_size=inner), Routing(experts, picks, normalise=True),
                          shared_inner=shared * wide) for picks, shared, inner in zip(*numbers, strict=True)]


def _of_each(config: Config, name: str, default: int) -> list[int]:
    """A value that configs state once, or for each layer."""
    layers = config.integer("num_hidden_layers")
    if isinstance(config.values.get(name), list):
        return config.listing(name, layers, lambda each: isinstance(each, int) and each > 0, "a whole number above 0") or []
    return [config.integer(name, default)] * layers


def _with_theta(config: Config) -> Config:
    """Where the rotation is called dynamic but has an `alpha`, that is a fixed factor of the base (NTK-aware scaling)."""
    name = "rope_parameters" if "rope_parameters" in config.values else "rope_scaling"
    given: dict[str, Any] = config.values.get(name) or {}
    if not isinstance(given, dict) or not given.get("alpha"):
        return config
    size, theta = parts.head_size(config), given.get("rope_theta", config.number("rope_theta", 10000.0))
    theta = theta * given["alpha"] ** (size / (size - 2))
    return config.changed(**{name: None, "rope_parameters": {"rope_type": "default", "rope_theta": theta}})


def phi(config: Config) -> ModelSpec:
    """Phi-3.5: layer norms with biases, LongRoPE, and experts picked one after another (sparsemixer)."""
    config.only("num_experts_per_tok", 2, "2: experts are picked and weighted in pairs")
    routing = Routing(parts.expert_count(config), 2, "sparsemixer", jitter=config.number("router_jitter_noise"))
    mixture = parts.experts(config, routing, inner="intermediate_size")
    return llama.spec(_one_scale(config), norm=lambda config: family.LayerNormSpec(config.number("rms_norm_eps")),
                      mlps=lambda _config: mixture, theta=1000000.0, windows=llama.slides(width=0),
                      head=family.HeadSpec(config.flag("tie_word_embeddings", False), bias=config.flag("lm_head_bias", False)))


def _one_scale(config: Config) -> Config:
    """With the amplitude of the rotation under the usual key; it is the same for short and long contexts in all checkpoints."""
    name = "rope_parameters" if "rope_parameters" in config.values else "rope_scaling"
    given = config.values.get(name)
    if not isinstance(given, dict) or "short_mscale" not in given:
        return config
    if given["short_mscale"] != given.get("long_mscale"):
        raise config.wrong(name, "equal short_mscale and long_mscale")
    scaled = {key: value for key, value in given.items() if not key.endswith("_mscale")}
    return config.changed(**{name: {**scaled, "attention_factor": given["short_mscale"]}})


AFMOE = (
    *Rule.named("model.layers.#.", {"self_attn.gate_proj.*": "attention.gate.*",
        "post_attention_layernorm.weight": "attention.post.weight", "pre_mlp_layernorm.weight": "mlp.pre.weight",
        "post_mlp_layernorm.weight": "mlp.post.weight", "mlp.router.gate.weight": "mlp.router.weight",
        "mlp.expert_bias": "mlp.correction"}), *EXPERTS)
GRANITE = (
    *Rule.named("model.layers.#.", {"block_sparse_moe.router.[layer.]weight": "mlp.router.weight",
        "block_sparse_moe.experts.gate_up_proj": ("mlp.experts.gate_up.weight", rules.stacked),
        "block_sparse_moe.experts.down_proj": ("mlp.experts.down.weight", rules.stacked),
        "block_sparse_moe.input_linear.weight": ("mlp.experts.gate_up.weight", rules.stacked),
        "block_sparse_moe.output_linear.weight": ("mlp.experts.down.weight", rules.stacked),
        "shared_mlp.input_linear.weight": "mlp.shared.gate_up.weight",
        "shared_mlp.output_linear.weight": "mlp.shared.down.weight"}), *rules.LLAMA)
_SHARED = rules.projections("shared_mlp", "mlp.shared")
HUNYUAN = (
    *Rule.named("model.layers.#.mlp.", {"gate.wg.weight": "mlp.router.weight", **_SHARED}), *rules.EXPERTS, *llama.HUNYUAN)
HUNYUAN3 = (*Rule.named("model.layers.#.mlp.", {
    "router.gate.weight": "mlp.router.weight", "expert_bias": "mlp.correction", "e_score_correction_bias": "mlp.correction",
    **_SHARED}), *EXPERTS)
ERNIE = (Rule("model.layers.#.mlp.[gate.]moe_statics.e_score_correction_bias", "blocks.#.mlp.correction", rules.flat),
         Rule("lm_head.bias", "head.bias"), Rule("model.mtp_**", None), *EXPERTS)
PHI = (*rules.MIXTRAL_EXPERTS, Rule("model.layers.#.mlp.router.weight", "blocks.#.mlp.router.weight"),
       Rule("lm_head.bias", "head.bias"), *rules.LAYER_NORM_LLAMA)
SARVAM = (Rule("model.word_embeddings.weight", "embedding.weight"), *Rule.named("model.layers.#.", {
    "attention.query_key_value.*": "attention.qkv.*", "attention.dense.*": "attention.o.*",
    "attention.query_layernorm.weight": "attention.q_norm.weight", "mlp.gate.expert_bias": "mlp.correction",
    "attention.key_layernorm.weight": "attention.k_norm.weight"}), *EXPERTS)
"""transformers writes these names for a model that its config calls GLM's."""
GLM = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "n_routed_experts": 128,
       "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 1408,
       "attention_out_bias": False}
_GRANITE = {"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2}
LIKE = (
    Like(("AfmoeForCausalLM",), ("afmoe",), {"max_position_embeddings": 16384, "head_dim": 128, "rms_norm_eps": 1e-5,
         "num_dense_layers": 1, "num_shared_experts": 2}, afmoe, AFMOE),
    Like(("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"), ("granitemoe", "granitemoeshared"), _GRANITE,
         partial(llama.granite, mlps=_granite_experts), GRANITE),
    Like(("GraniteMoeSWAForCausalLM",), ("granitemoe_swa",), _GRANITE,
         partial(llama.granite_swa, mlps=_granite_experts), GRANITE),
    Like(("Dots1ForCausalLM",), ("dots1",), {"max_position_embeddings": 2048, "first_k_dense_replace": 0, "n_shared_experts": 0,
         "moe_intermediate_size": 1408, "norm_topk_prob": False}, dots1, EXPERTS),
    Like(("Glm4MoeForCausalLM",), ("glm4_moe",), GLM, glm4_moe, (*EXPERTS, *SARVAM)),
    Like(("SarvamMoEForCausalLM",), ("sarvam_moe",), {**GLM, "num_key_value_heads": 4, "head_dim": 64, "rms_norm_eps": 1e-6,
         "num_experts_per_tok": 6, "use_qk_norm": True, "moe_intermediate_size": 1024, "routed_scaling_factor": 2.5},
         sarvam, SARVAM),
    Like(("Cohere2MoeForCausalLM",), ("cohere2_moe",),
         {"max_position_embeddings": 8192, "head_dim": 128, "expert_selection_fn": "softmax", "num_experts_per_tok": 2,
          "shared_expert_combination_strategy": "average"}, cohere2, EXPERTS),
    Like(("HYV3ForCausalLM",), ("hy_v3",), {"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128,
         "rms_norm_eps": 1e-5, "num_local_experts": 192, "num_experts_per_tok": 8, "num_shared_experts": 1,
         "moe_intermediate_size": 1536, "router_scaling_factor": 2.826, "first_k_dense_replace": 1}, hunyuan3, HUNYUAN3),
    Like(("Kolibri1ForCausalLM",), ("kolibri1",),
         {"max_position_embeddings": 262144, "num_key_value_heads": 4, "head_dim": 128, "num_local_experts": 384,
          "num_experts_per_tok": 6, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}, kolibri1,
         (*Rule.named("model.layers.#.", {
             "post_attn_norm.weight": "attention.post.weight", "post_ffn_norm.weight": "mlp.post.weight",
             "post_self_attn_layernorm.weight": "attention.post.weight", "post_mlp_layernorm.weight": "mlp.post.weight",
             "moe.router.expert_bias": "mlp.correction"}), *EXPERTS)),
    Like(("MellumForCausalLM",), ("mellum",), {"max_position_embeddings": 131072, "num_key_value_heads": 4, "head_dim": 128,
         "num_experts_per_tok": 8, "moe_intermediate_size": 896}, mellum, (Rule("mtp.**", None), *EXPERTS)),
    Like(("FlintForCausalLM",), ("flint",), {"max_position_embeddings": 262144, "num_key_value_heads": 4, "head_dim": 128,
         "num_experts": 256, "num_experts_per_tok": 6, "moe_intermediate_size": 512, "norm_topk_prob": True,
         "shared_expert_intermediate_size": 1024, "mlp_only_layers": [0, 1]}, flint,
         (Rule("model.layers.#.self_attn.softmax_offset", "blocks.#.attention.sinks"), *rules.QWEN_EXPERTS, *rules.LLAMA)),
    Like(("MiniMaxM2ForCausalLM",), ("minimax_m2",),
         {"max_position_embeddings": 196608, "num_key_value_heads": 8, "head_dim": 128, "num_experts_per_tok": 8,
          "num_local_experts": 256}, minimax_m2,
         (*Rule.named("model.layers.#.", {f"{name}.e_score_correction_bias": "mlp.correction" for name in (
             "block_sparse_moe", "mlp")}), *rules.MIXTRAL_EXPERTS, *rules.LLAMA)),
    Like(("OlmoeForCausalLM",), ("olmoe",), {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
         "num_local_experts": 64, "num_experts_per_tok": 8}, olmoe, EXPERTS),
    Like(("FlexOlmoForCausalLM",), ("flex_olmo",), {"max_position_embeddings": 4096, "num_local_experts": 7,
         "num_experts_per_tok": 5}, partial(olmoe, theta=500000.0, pre=False, post=True), (*rules.EXPERTS, *olmo.RULES)),
    Like(("SolarOpenForCausalLM",), ("solar_open",), {**GLM, "head_dim": 128, "moe_intermediate_size": 1280,
         "first_k_dense_replace": 0}, partial(llama.spec, mlps=parts.dense_then_experts, theta=1000000.0), EXPERTS),
    Like(("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoEForCausalLM"), ("ernie4_5_moe",), {"max_position_embeddings": 131072,
         "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536,
         "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1}, ernie4_5, ERNIE),
    Like(("HunYuanMoEV1ForCausalLM",), ("hunyuan_v1_moe",), olmo.DEFAULTS, hunyuan, HUNYUAN),
    Like(("PhimoeForCausalLM", "PhiMoEForCausalLM"), ("phimoe",),
         {**DEFAULTS, "num_local_experts": 16, "router_jitter_noise": 0.01}, phi, PHI))
