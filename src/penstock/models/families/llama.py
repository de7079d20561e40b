"""Llama 1 to 3.3, the many models of the same shape, and in `LIKE` those that differ from it in little."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from penstock.models import family
from penstock.models.family import Config, Like, MixerSpec, ModelSpec, QueryKeyNorm, RopeSpec, Rule, parts, rope, rules

ARCHITECTURES = ("LlamaForCausalLM",)
MODEL_TYPES = ("llama",)
DEFAULTS = {"max_position_embeddings": 2048}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Rotations of families whose configuration classes scale by default."""
RULES = (
    *rules.LLAMA,
    # EXAONE 3 is Llama by other names, and transformers writes it as such.
    *Rule.named("transformer.", {"wte.weight": "embedding.weight", "ln_f.weight": "norm.weight"}, stem=""),
    *Rule.named("transformer.h.#.", {
        **rules.projections("attn.attention", "attention", "qkv"), "attn.attention.out_proj.*": "attention.o.*",
        "ln_1.weight": "attention.pre.weight", "ln_2.weight": "mlp.pre.weight", "mlp.c_fc_0.*": "mlp.gate.*",
        "mlp.c_fc_1.*": "mlp.up.*", "mlp.c_proj.*": "mlp.down.*"}))


def spec(config: Config, *, norm: Callable[[Config], Any] = parts.rms_norm, mlp: Callable[..., MixerSpec] = parts.gated_mlp,
         mlps: Callable[[Config], MixerSpec | Sequence[MixerSpec]] | None = None, normed: str = "", theta: float = 10000.0,
         fraction: float = 1.0, interleaved: bool = False, turn: RopeSpec | None = None,
         turns: Sequence[RopeSpec | None] | None = None, windows: Callable[[Config], list[int]] | None = None,
         attends: Mapping[str, Any] | None = None, full: Mapping[str, Any] | None = None, **more: Any) -> ModelSpec:
    """`mlps`: feed-forward parts, if not an `mlp` each. `normed`: queries and keys are, "before" or "after" rotation, or over
    all heads together ("whole"). `turn`: the rotation, if it is not that of the three before it. `turns`, `windows`: of
    each layer.
    `attends`: other fields of attention; `full`: of that in layers without a window. `more`: of `parts.layered`."""
    each, bias = norm(config), config.flag("attention_bias", False)
    turn = turn or rope(config, parts.head_size(config), theta=theta, fraction=fraction, interleaved=interleaved)
    attention = parts.attention(config, rope=turn, bias=bias, output_bias=config.flag("attention_out_bias", bias),
                                norm=QueryKeyNorm(each, normed == "whole", after=normed == "after") if normed else None)
    attention = replace(attention, clip=config.nullable_number("clip_qkv", 0.0), **attends or {})
    forward = mlps(config) if mlps else mlp(config, bias=config.flag("mlp_bias", False))
    sliding = parts.sliding(attention, windows(config), replace(attention, **full or {})) if windows else attention
    if turns:
        every = sliding if isinstance(sliding, list) else [attention] * len(turns)
        sliding = [replace(one, rope=turn) for one, turn in zip(every, turns, strict=True)]
    return parts.layered(config, sliding, forward, each, **more)


def slides(where: Callable[[int], bool] = lambda _layer: True, width: int = 4096) -> Callable[[Config], list[int]]:
    """Each layer's window: unless the config says otherwise, `width` in the layers of these numbers; by default all slide."""
    return lambda config: config.windows(where, config.nullable_integer("sliding_window", width))


def biased(config: Config, default: bool) -> Config:
    """With the biases of all matrices, which the config calls `use_bias`, under Llama's names."""
    return config.changed(**dict.fromkeys(("attention_bias", "mlp_bias"), config.flag("use_bias", default)))


def ministral3(config: Config) -> ModelSpec:
    """Mistral whose queries grow with the logarithm of their position, far behind the trained length."""
    given = dict(config.values.get("rope_parameters") or {})
    beta, original = given.pop("llama_4_scaling_beta", None), given.get("original_max_position_embeddings", 16384)
    given.pop("max_position_embeddings", None)  # is there by default, and means nothing
    return spec(config.changed(rope_parameters=given), theta=1000000.0, windows=slides(width=0),
                attends={"growth": (float(beta), int(original))} if beta else {})


def persimmon(config: Config) -> ModelSpec:
    """Squared ReLUs; queries, keys and values are stored by head."""
    return spec(config, norm=parts.layer_norm, mlp=parts.plain_mlp, fraction=0.5,
                normed="before" if config.flag("qk_layernorm", True) else "")


def stablelm(config: Config) -> ModelSpec:
    """LayerNorms and partial rotation, perhaps parallel branches and a norm of its own for each head."""
    normed = QueryKeyNorm(parts.layer_norm(config, bias=False), own=True) if config.flag("qk_layernorm", False) else None
    return spec(config.changed(attention_bias=config.flag("use_qkv_bias", False), attention_out_bias=False),
                norm=parts.layer_norm, fraction=0.25, attends={"norm": normed},
                same=config.flag("use_parallel_residual", False))


def internlm(config: Config) -> ModelSpec:
    """InternLM 2 stores queries, keys and values of each group of heads together."""
    whole = next((config.flag(name, False) for name in ("bias", "mlp_bias") if name in config.values), False)
    bias = next((config.flag(name, False) for name in ("qkv_bias", "attention_bias") if name in config.values), whole)
    return spec(config.changed(attention_bias=bias, attention_out_bias=whole,
                               mlp_bias=whole and config.named("InternLM3ForCausalLM", "internlm3")))


def phi(config: Config) -> ModelSpec:
    """Parallel branches with one norm, partial rotation, biases throughout."""
    return spec(config, norm=parts.layer_norm, mlp=parts.plain_mlp, fraction=0.5, same=True,
                normed="before" if config.flag("qk_layernorm", False) else "",
                head=family.HeadSpec(config.flag("tie_word_embeddings", False), bias=True))


def phi3(config: Config) -> ModelSpec:
    """Phi-3 (mini, medium) and Phi-4 (mini and the 14B): merged matrices, partial rotation, LongRoPE."""
    config.absent("attention_bias")
    return spec(config, turn=rope(config, parts.head_size(config), aliases={"su": "longrope", "yarn": "longrope"}),
                windows=slides(width=0))


def granite(config: Config, *, sinks: bool = False, **more: Any) -> ModelSpec:
    """A multiplier on the embedding, the scores, every branch and the logits."""
    return spec(config, attends={"scale": config.number("attention_multiplier", 1.0), "sinks": sinks}, **more,
                scale=config.number("residual_multiplier", 1.0),
                embedding=family.EmbeddingSpec(config.number("embedding_multiplier", 1.0)),
                head=family.HeadSpec(config.flag("tie_word_embeddings", False), divisor=config.number("logits_scaling", 1.0)))


def hyperclovax(config: Config) -> ModelSpec:
    """Granite whose logits are multiplied, not divided, and perhaps with a norm behind each branch."""
    factor = config.nullable_number("attention_multiplier", 0.0) or parts.head_size(config) ** -0.5
    return granite(config.changed(attention_multiplier=factor, logits_scaling=1.0 / config.number("logits_scaling", 1.0)),
                   post=config.flag("use_post_norm", True))


def granite_swa(config: Config, **more: Any) -> ModelSpec:
    """Granite with sinks, windows but in every fourth layer, and perhaps each layer's own base of the rotation; 0: none."""
    turn, layers = rope(config, parts.head_size(config)), config.integer("num_hidden_layers")
    bases = config.listing("layer_rope_theta", layers, lambda base: isinstance(base, int | float) and base >= 0, "0 or more")
    return granite(config, sinks=True, windows=slides(lambda layer: layer % 4 != 0, 128), **more,
                   turns=[replace(turn, theta=float(base)) if base else None for base in bases or ()])


def baichuan(config: Config) -> ModelSpec:
    """Baichuan 1 and 2: queries, keys and values are merged; models of 40 heads (13B) have ALiBi instead of rotation."""
    heads = config.integer("num_attention_heads")
    attends = {"rope": None, "slopes": parts.slopes(heads)} if heads == 40 else {}
    length = config.integer("model_max_length" if "model_max_length" in config.values else "max_position_embeddings")
    return spec(config, attends=attends, max_positions=length)


def _normalised(tensor: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """Baichuan 2 divides each row of its head by the row's length."""
    return torch.nn.functional.normalize(tensor.float()).to(tensor.dtype) if spec.vocab_size == 125696 else tensor


def cohere(config: Config) -> ModelSpec:
    """Command R and Cohere 2 (Command A, Aya): parallel branches, LayerNorms without bias, interleaved rotation; Cohere 2
    rotates in sliding layers alone."""
    every, unbiased = config.integer("sliding_window_pattern", 4), partial(parts.layer_norm, bias=False)
    head = family.HeadSpec(config.flag("tie_word_embeddings", True), divisor=1.0 / config.number("logit_scale", 0.0625))
    norm = QueryKeyNorm(unbiased(config), own=True) if config.flag("use_qk_norm", False) else None
    second = config.named("Cohere2ForCausalLM", "cohere2")
    windows = slides(lambda layer: (layer + 1) % every != 0) if second else None
    return spec(config, norm=unbiased, interleaved=True, attends={"norm": norm}, windows=windows, full={"rope": None},
                same=True, head=head, theta=10000.0 if second else 500000.0)


def minicpm(config: Config) -> ModelSpec:
    """Scaled embeddings, branches and logits; MiniCPM 3 has latent attention."""
    config.absent("num_experts")
    layers, width = config.integer("num_hidden_layers"), config.integer("hidden_size")
    more: dict[str, Any] = {
        "scale": (config.nullable_number("scale_depth", 1.4) or layers**0.5) / layers**0.5,
        "embedding": family.EmbeddingSpec(config.number("scale_emb")), "head": family.HeadSpec(
            config.flag("tie_word_embeddings", True), divisor=width / (config.nullable_number("dim_model_base", 256) or width))}
    if config.named("MiniCPM3ForCausalLM", "minicpm3"):
        if "v_head_dim" not in config.values:
            config = config.changed(v_head_dim=width // config.integer("num_attention_heads"))
        attention = parts.latent_attention(config, rope(config, config.integer("qk_rope_head_dim")))
        mlp = parts.gated_mlp(config, bias=config.flag("mlp_bias", False))
        return parts.layered(config, attention, mlp, parts.rms_norm(config), **more)
    return spec(config, **more)


def smollm3(config: Config) -> ModelSpec:
    """Every fourth layer rotates nothing (NoPE)."""
    every, turn = config.integer("no_rope_layer_interval", 4), rope(config, parts.head_size(config), theta=2000000.0)
    # Despite its name, a 1 in no_rope_layers is a layer that rotates.
    turns = config.layers("no_rope_layers", 0, 1, lambda layer: (layer + 1) % every != 0)
    width = config.nullable_integer("sliding_window", 0) if config.flag("use_sliding_window", False) else 0
    return spec(config, turns=[turn if turned else None for turned in turns],
                windows=lambda config: config.windows(lambda layer: not turns[layer], width))


APERTUS = (*Rule.named("model.layers.#.", {
    "attention_layernorm.weight": "attention.pre.weight", "feedforward_layernorm.weight": "mlp.pre.weight",
    "mlp.act_fn.*": ("mlp.act.*", rules.flat)}), *rules.EMBEDDING, *rules.ATTENTION, *rules.MLP)
BAICHUAN = (Rule("lm_head.weight", "head.weight", _normalised),
            Rule("model.layers.#.self_attn.W_pack.weight", "blocks.#.attention.qkv.weight"), *rules.LLAMA)
COHERE = (*Rule.named("model.layers.#.self_attn.", {
    f"{one}_norm.weight": (f"attention.{one}_norm.weight", rules.flat) for one in "qk"}), *rules.LLAMA)
HUNYUAN = (*Rule.named("model.layers.#.self_attn.", {
    "query_layernorm.weight": "attention.q_norm.weight", "key_layernorm.weight": "attention.k_norm.weight"}), *rules.LLAMA)
INTERNLM = (
    *rules.LLAMA,
    *Rule.named("", {"model.tok_embeddings.weight": "embedding.weight", "output.weight": "head.weight"}, stem=""),
    *Rule.named("model.layers.#.", {"attention.wqkv.*": ("attention.qkv.*", rules.by_group), "attention.wo.*": "attention.o.*",
        "attention_norm.weight": "attention.pre.weight", "feed_forward.w1.*": "mlp.gate.*", "feed_forward.w3.*": "mlp.up.*",
        "feed_forward.w2.*": "mlp.down.*", "ffn_norm.weight": "mlp.pre.weight"}))
_NORMED = (Rule("model.final_layernorm.*", "norm.*"), *Rule.named("model.layers.#.self_attn.", {
    "dense.*": "attention.o.*", **{f"{one}_layernorm.*": f"attention.{one}_norm.*" for one in "qk"}}), *rules.LAYER_NORM_LLAMA)
PERSIMMON = (*Rule.named("model.layers.#.", {
    "self_attn.query_key_value.*": ("attention.qkv.*", rules.interleaved), "mlp.dense_h_to_4h.*": "mlp.up.*",
    "mlp.dense_4h_to_h.*": "mlp.down.*"}), *_NORMED)
PHI = (*Rule.named("model.layers.#.", {"mlp.fc1.*": "mlp.up.*", "mlp.fc2.*": "mlp.down.*"}), Rule("lm_head.bias", "head.bias"),
       *_NORMED)
PHI3 = (
    *rules.EMBEDDING, *rules.PRE_NORMS,
    *Rule.named("model.layers.#.", {"self_attn.qkv_proj.weight": "attention.qkv.weight",
        "self_attn.o_proj.weight": "attention.o.weight", "self_attn.rotary_emb.inv_freq": None,
        "mlp.gate_up_proj.weight": "mlp.gate_up.weight", "mlp.down_proj.weight": "mlp.down.weight"}))
STABLELM = (*Rule.named("model.layers.#.self_attn.", {
    f"{one}_layernorm.norms.*.weight": f"attention.{one}_norm.*.weight" for one in "qk"}), *rules.LAYER_NORM_LLAMA)
STARCODER2 = (
    *Rule.named("model.layers.#.", {"mlp.c_fc.*": "mlp.up.*", "mlp.c_proj.*": "mlp.down.*"}), *rules.LAYER_NORM_LLAMA)
LIKE = (
    Like(("ApertusForCausalLM",), ("apertus",), {"hidden_act": "xielu", "max_position_embeddings": 65536, "rms_norm_eps": 1e-5,
         "rope_scaling": {**LLAMA3, "factor": 8.0, "rope_theta": 12000000.0}},
         partial(spec, mlp=parts.plain_mlp, theta=12000000.0, normed="before"), APERTUS),
    Like(("ArceeForCausalLM",), ("arcee",), {"hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
         partial(spec, mlp=parts.plain_mlp)),
    Like(("BaichuanForCausalLM", "BaiChuanForCausalLM"), ("baichuan",), {"max_position_embeddings": 4096}, baichuan, BAICHUAN),
    Like(("CohereForCausalLM", "Cohere2ForCausalLM"), ("cohere", "cohere2"), {"max_position_embeddings": 8192}, cohere, COHERE),
    Like(("CwmForCausalLM",), ("cwm",), {"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128,
         "rms_norm_eps": 1e-5, "sliding_window": 8192, "rope_scaling": {**LLAMA3, "factor": 16.0, "rope_theta": 1000000.0}},
         partial(spec, theta=1000000.0, windows=slides(lambda layer: layer % 4 != 0))),
    Like(("Ernie4_5ForCausalLM",), ("ernie4_5",),
         {"max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5,
          "tie_word_embeddings": True}, lambda config: spec(biased(config, False), theta=500000.0, interleaved=True)),
    Like(("ExaoneForCausalLM",), ("exaone",),
         {"max_position_embeddings": 4096, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
         lambda config: spec(config.renamed(num_layers="num_hidden_layers", layer_norm_epsilon="rms_norm_eps",
                                            activation_function="hidden_act"), theta=500000.0), RULES),
    Like(("GraniteForCausalLM",), ("granite",), DEFAULTS, granite),
    Like(("GraniteSWAForCausalLM",), ("granite_swa",), {"max_position_embeddings": 8192, "num_key_value_heads": 4,
         "rms_norm_eps": 1e-5, "tie_word_embeddings": True}, granite_swa),
    Like(("HeliumForCausalLM",), ("helium",), {"max_position_embeddings": 4096, "head_dim": 128, "attention_out_bias": False,
         "rms_norm_eps": 1e-8}, partial(spec, theta=100000.0, interleaved=True)),
    Like(("HyperCLOVAXForCausalLM",), ("hyperclovax",), DEFAULTS, hyperclovax, (*rules.LLAMA, *Rule.named("model.layers.#.", {
        "post_norm1.weight": "attention.post.weight", "post_norm2.weight": "mlp.post.weight"}))),
    Like(("HunYuanDenseV1ForCausalLM",), ("hunyuan_v1_dense",),
         {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}, partial(spec, normed="after"), HUNYUAN),
    Like(("InternLM2ForCausalLM", "InternLM3ForCausalLM"), ("internlm2", "internlm3"),
         {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5}, internlm, INTERNLM),
    Like(("Jais2ForCausalLM",), ("jais2",), {"hidden_act": "relu2", "max_position_embeddings": 8192, "attention_bias": True,
         "mlp_bias": True}, partial(spec, norm=parts.layer_norm, mlp=parts.plain_mlp), rules.LAYER_NORM_LLAMA),
    Like(("MiniCPMForCausalLM", "MiniCPM3ForCausalLM"), ("minicpm", "minicpm3"), {"max_position_embeddings": 32768,
         "rms_norm_eps": 1e-5, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "q_lora_rank": 768},
         minicpm, (*rules.EMBEDDING, *rules.LATENT_ATTENTION, *rules.ATTENTION, *rules.MLP, *rules.PRE_NORMS)),
    # Mistral 3, of whose checkpoints with vision the text part is used, may be Mistral Small 3, which is Mistral.
    Like(("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"), ("ministral3", "mistral3"),
         {"max_position_embeddings": 262144, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}, ministral3,
         rules.text_part(rules.LLAMA)),
    Like(("MistralForCausalLM", "MinistralForCausalLM"), ("mistral", "ministral"),
         {"max_position_embeddings": 131072, "num_key_value_heads": 8}, partial(spec, windows=slides())),
    Like(("NemotronForCausalLM",), ("nemotron",), {"hidden_act": "relu2", "max_position_embeddings": 4096},
         partial(spec, norm=partial(parts.layer_norm, name="norm_eps", offset=1.0), mlp=parts.plain_mlp, fraction=0.5),
         rules.LAYER_NORM_LLAMA),
    Like(("OlmoForCausalLM",), ("olmo",), DEFAULTS,
         partial(spec, norm=lambda _config: family.LayerNormSpec(1e-5, bias=False, weight=False))),
    Like(("PersimmonForCausalLM",), ("persimmon",), {"hidden_act": "relu2", "max_position_embeddings": 16384,
         "attention_bias": True, "mlp_bias": True}, persimmon, PERSIMMON),
    Like(("PhiForCausalLM",), ("phi",),
         {"hidden_act": "gelu_new", "max_position_embeddings": 2048, "attention_bias": True, "mlp_bias": True}, phi, PHI),
    Like(("Phi3ForCausalLM",), ("phi3",),
         {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}, phi3, PHI3),
    Like(("SeedOssForCausalLM",), ("seed_oss",), {"max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128,
         "attention_bias": True, "attention_out_bias": False}, spec),
    Like(("SmolLM3ForCausalLM",), ("smollm3",),
         {"max_position_embeddings": 32768, "num_key_value_heads": 4, "tie_word_embeddings": True}, smollm3),
    Like(("StableLmForCausalLM", "StableLMEpochForCausalLM"), ("stablelm", "stablelm_epoch"), {"max_position_embeddings": 4096},
         stablelm, STABLELM),
    Like(("Starcoder2ForCausalLM",), ("starcoder2",),
         {"hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 4096, "num_key_value_heads": 2,
          "tie_word_embeddings": True},
         lambda config: spec(biased(config, True), norm=partial(parts.layer_norm, name="norm_epsilon"), mlp=parts.plain_mlp,
                             windows=slides(width=0)), STARCODER2))
