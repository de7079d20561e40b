"""Mixtral, and in `LIKE` other mixtures of experts whose layers are Llama's otherwise."""

from functools import partial

from penstock.models.families import llama
from penstock.models.family import Config, EmbeddingSpec, Like, MixerSpec, ModelSpec, Rule, parts, rules

ARCHITECTURES = ("MixtralForCausalLM",)
MODEL_TYPES = ("mixtral",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 4096 * 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 2, "num_local_experts": 8}
RULES = (*rules.MIXTRAL_EXPERTS, *rules.LLAMA)


def _experts(config: Config, score: str = "softmax", *, normalise: bool = True, corrected: bool = False) -> MixerSpec:
    """The experts of every layer. `normalise`: a token's weights are, over the picked ones."""
    routing = parts.routing(config, score, normalise=normalise, corrected=corrected)
    return parts.experts(config, routing, inner="intermediate_size")


def spec(config: Config) -> ModelSpec:
    return llama.spec(config, mlps=_experts, theta=1000000.0, windows=llama.slides(width=0))


def olmoe(config: Config) -> ModelSpec:
    """Queries and keys are normed over all heads together."""
    config.absent("clip_qkv")
    return llama.spec(config, mlps=partial(_experts, normalise=config.flag("norm_topk_prob", False)), normed="whole")


def minimax_m2(config: Config) -> ModelSpec:
    """The same, and partial rotation, and experts by corrected sigmoids."""
    size = parts.head_size(config)
    return llama.spec(config, mlps=partial(_experts, score="sigmoid", corrected=True), theta=5000000.0, normed="whole",
                      fraction=config.integer("rotary_dim", size) / size, beyond=parts.draft_layers(config))


def glm4_moe(config: Config) -> ModelSpec:
    """GLM-4.5, 4.6 and 4.7: dense layers first, then experts by corrected sigmoids in groups, and a shared one."""
    return llama.spec(config, mlps=parts.dense_then_experts, normed="before" if config.flag("use_qk_norm", False) else "",
                      fraction=0.5, beyond=parts.draft_layers(config))


def dots1(config: Config) -> ModelSpec:
    """dots.llm1: the same, with normed queries and keys, and windows in the upper layers."""
    first = config.integer("max_window_layers", 62)
    return llama.spec(config, mlps=parts.dense_then_experts, normed="before",
                      windows=llama.slides(lambda layer: layer >= first))


def afmoe(config: Config) -> ModelSpec:
    """Trinity: attention whose results are gated, rotation in sliding layers alone, norms around each branch."""
    every, scale = config.integer("global_attn_every_n_layers", 4), config.integer("hidden_size") ** 0.5
    return llama.spec(config, normed="before", attends={"gate": True}, full={"rope": None}, mlps=_afmoe_mlps, post=True,
                      windows=llama.slides(lambda layer: (layer + 1) % every != 0, 1024),
                      embedding=EmbeddingSpec(scale if config.flag("mup_enabled", False) else 1.0))


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


AFMOE = (
    *Rule.named("model.layers.#.", {"self_attn.gate_proj.*": "attention.gate.*",
        "post_attention_layernorm.weight": "attention.post.weight", "pre_mlp_layernorm.weight": "mlp.pre.weight",
        "post_mlp_layernorm.weight": "mlp.post.weight", "mlp.router.gate.weight": "mlp.router.weight",
        "mlp.expert_bias": "mlp.correction"}),
    *rules.EXPERTS,
    *rules.LLAMA,
)
GRANITE = (
    *Rule.named("model.layers.#.", {"block_sparse_moe.router.[layer.]weight": "mlp.router.weight",
        "block_sparse_moe.input_linear.weight": ("mlp.experts.gate_up.weight", rules.stacked),
        "block_sparse_moe.output_linear.weight": ("mlp.experts.down.weight", rules.stacked),
        "shared_mlp.input_linear.weight": "mlp.shared.gate_up.weight",
        "shared_mlp.output_linear.weight": "mlp.shared.down.weight"}),
    *rules.LLAMA,
)
LIKE = (
    Like(("AfmoeForCausalLM",), ("afmoe",),
         {"hidden_act": "silu", "max_position_embeddings": 16384, "head_dim": 128, "rms_norm_eps": 1e-5, "num_dense_layers": 1},
         afmoe, AFMOE),
    Like(("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"), ("granitemoe", "granitemoeshared"),
         {"hidden_act": "silu", "max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2},
         partial(llama.granite, mlps=_granite_experts), GRANITE),
    Like(("Dots1ForCausalLM",), ("dots1",),
         {"hidden_act": "silu", "max_position_embeddings": 2048, "first_k_dense_replace": 0, "n_shared_experts": 0,
          "moe_intermediate_size": 1408, "norm_topk_prob": False}, dots1, (*rules.EXPERTS, *rules.LLAMA)),
    Like(("Glm4MoeForCausalLM",), ("glm4_moe",),
         {"hidden_act": "silu", "max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
          "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
          "norm_topk_prob": True, "moe_intermediate_size": 1408, "attention_out_bias": False}, glm4_moe,
         (*rules.EXPERTS, *rules.LLAMA)),
    Like(("MiniMaxM2ForCausalLM",), ("minimax_m2",),
         {"hidden_act": "silu", "max_position_embeddings": 196608, "num_key_value_heads": 8, "head_dim": 128,
          "num_experts_per_tok": 8, "num_local_experts": 256}, minimax_m2,
         (Rule("model.layers.#.block_sparse_moe.e_score_correction_bias", "blocks.#.mlp.correction"), *rules.MIXTRAL_EXPERTS,
          *rules.LLAMA)),
    Like(("OlmoeForCausalLM",), ("olmoe",),
         {"hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts": 64,
          "num_experts_per_tok": 8}, olmoe, (*rules.EXPERTS, *rules.LLAMA)),
)
