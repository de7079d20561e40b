"""LFM2, dense and with experts: gated short convolutions in most layers, attention with normed queries and keys in the rest."""

from collections.abc import Callable, Sequence

from penstock.layers.short_conv import ShortConvSpec
from penstock.models.family import Config, Like, MixerSpec, ModelSpec, QueryKeyNorm, RMSNormSpec, Rule, flat, parts, rope, rules

ARCHITECTURES = ("Lfm2ForCausalLM",)
MODEL_TYPES = ("lfm2",)
DEFAULTS = {"max_position_embeddings": 128000, "num_key_value_heads": 8, "conv_L_cache": 3, "tie_word_embeddings": True}
RULES = (
    Rule("model.embedding_norm.weight", "norm.weight"),
    *Rule.named("model.layers.#.", {
        "operator_norm.weight": "attention.pre.weight", "ffn_norm.weight": "mlp.pre.weight",
        "self_attn.out_proj.*": "attention.o.*", "self_attn.q_layernorm.weight": "attention.q_norm.weight",
        "self_attn.k_layernorm.weight": "attention.k_norm.weight", "conv.in_proj.*": "attention.input.*",
        "conv.out_proj.*": "attention.o.*", "conv.conv.weight": ("attention.conv.weight", flat),
        "conv.conv.bias": "attention.conv.bias", "feed_forward.w1.*": "mlp.gate.*", "feed_forward.w3.*": "mlp.up.*",
        "feed_forward.w2.*": "mlp.down.*"}),
    *rules.LLAMA)
EXPERTS = (
    *Rule.named("model.layers.#.feed_forward.", {
        "gate.weight": "mlp.router.weight", "expert_bias": "mlp.correction", "experts.@.w1.*": "mlp.experts.@.gate.*",
        "experts.@.w3.*": "mlp.experts.@.up.*", "experts.@.w2.*": "mlp.experts.@.down.*",
        "experts.gate_up_proj": ("mlp.experts.gate_up.weight", rules.stacked),
        "experts.down_proj": ("mlp.experts.down.weight", rules.stacked)}),
    *RULES)


def dense(config: Config) -> MixerSpec:
    """Its inner width is two thirds of the config's, times a factor, rounded up, unless the config says that it is not."""
    inner = config.integer("block_ff_dim", config.values.get("intermediate_size"))
    if config.flag("block_auto_adjust_ff_dim", True):
        multiple = config.integer("block_multiple_of", 256)
        inner = int(config.number("block_ffn_dim_multiplier", 1.0) * (2 * inner // 3))
        inner = -(-inner // multiple) * multiple
    return parts.gated_mlp(config.changed(intermediate_size=inner))


def mixture(config: Config) -> list[MixerSpec]:
    """Dense layers first, then experts by sigmoids, corrected if `use_expert_bias`."""
    layers, first = config.integer("num_hidden_layers"), config.integer("num_dense_layers", 2, least=0)
    routing = parts.routing(config, "sigmoid", normalise=config.flag("norm_topk_prob", True),
                            corrected=config.flag("use_expert_bias", True), scale=config.number("routed_scaling_factor", 1.0))
    sparse = parts.experts(config, routing)
    return [parts.gated_mlp(config) if i < first else sparse for i in range(layers)]


def spec(config: Config, mlp: Callable[[Config], MixerSpec | Sequence[MixerSpec]] = dense) -> ModelSpec:
    if "tie_embedding" in config.values:
        config = config.changed(tie_word_embeddings=config.flag("tie_embedding", True))
    norm, layers = RMSNormSpec(config.number("norm_eps", 1e-5)), config.integer("num_hidden_layers")
    attention = parts.attention(config, rope=rope(config, parts.head_size(config), theta=1000000.0), norm=QueryKeyNorm(norm))
    conv = ShortConvSpec(attention.width, attention.width, config.integer("conv_L_cache", least=2),
                         config.flag("conv_bias", False))
    kinds = config.listing("layer_types", layers, ("conv", "full_attention").__contains__, "conv or full_attention")
    if kinds is None:
        full = config.values.get("full_attn_idxs", list(range(layers)))
        if not isinstance(full, list) or not all(isinstance(layer, int) for layer in full):
            raise config.wrong("full_attn_idxs", "a list of layers' numbers")
        kinds = ["full_attention" if i in full else "conv" for i in range(layers)]
    return parts.layered(config, [conv if kind == "conv" else attention for kind in kinds], mlp(config), norm)


LIKE = (
    Like(("Lfm2VlForConditionalGeneration",), ("lfm2_vl",), DEFAULTS, spec, rules.text_part(RULES)),
    Like(("Lfm2MoeForCausalLM",), ("lfm2_moe",),
         {**DEFAULTS, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792}, lambda config: spec(
             config, mixture), EXPERTS))
