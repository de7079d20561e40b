"""AFMoE (Trinity): attention whose results are gated, rotation in sliding layers alone, norms around each branch, experts."""

from functools import partial

from penstock.models.families import llama
from penstock.models.family import Config, EmbeddingSpec, MixerSpec, ModelSpec, Rule, parts, rules

ARCHITECTURES = ("AfmoeForCausalLM",)
MODEL_TYPES = ("afmoe",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 16384, "head_dim": 128, "rms_norm_eps": 1e-5,
            "num_dense_layers": 1}
RULES = (
    *Rule.named("model.layers.#.", {"self_attn.gate_proj.*": "attention.gate.*",
        "post_attention_layernorm.weight": "attention.post.weight", "pre_mlp_layernorm.weight": "mlp.pre.weight",
        "post_mlp_layernorm.weight": "mlp.post.weight", "mlp.router.gate.weight": "mlp.router.weight",
        "mlp.expert_bias": "mlp.correction"}),
    *rules.EXPERTS,
    *rules.LLAMA,
)


def spec(config: Config) -> ModelSpec:
    every, scale = config.integer("global_attn_every_n_layers", 4), config.integer("hidden_size") ** 0.5
    return llama.spec(config, normed="before", attends={"gate": True}, full={"rope": None}, mlps=_mlps, post=True,
                      windows=llama.slides(lambda layer: (layer + 1) % every != 0, 1024),
                      embedding=EmbeddingSpec(scale if config.flag("mup_enabled", False) else 1.0))


def _mlps(config: Config) -> list[MixerSpec]:
    """Dense layers first."""
    if config.integer("n_group", 1) != 1 or config.integer("topk_group", 1) != 1:
        raise config.wrong("n_group", "1: experts in groups are not there")
    routing = partial(parts.routing, score="sigmoid", normalise=True, scale=config.number("route_scale", 1.0), corrected=True)
    names = {"num_dense_layers": "first_k_dense_replace", "num_shared_experts": "n_shared_experts"}
    return parts.dense_then_experts(config.renamed(**names), routing)
