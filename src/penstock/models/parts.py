"""Parts of the spec that Llama-like configs describe with the same keys. A family calls these, and adds only what differs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from penstock.core.errors import ModelError
from penstock.layers.attention import AttentionSpec
from penstock.layers.block import BlockSpec, BranchSpec, LayerNormSpec, NormSpec, RMSNormSpec
from penstock.layers.build import MixerSpec
from penstock.layers.embedding import EmbeddingSpec, HeadSpec
from penstock.layers.experts import ExpertsSpec
from penstock.layers.latent import LatentAttentionSpec
from penstock.layers.mlp import MLPSpec
from penstock.layers.rope import RopeScaling, RopeSpec, YarnScaling
from penstock.layers.spec import ModelSpec
from penstock.models.config import ACTIVATIONS, Config
from penstock.ops.experts import Glu
from penstock.ops.routing import Routing


def head_size(config: Config) -> int:
    """`head_dim`, or else (null, too) the width shared evenly among the heads."""
    width, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if config.given.get("head_dim", config.values.get("head_dim")) is None and width % heads:
        raise config.wrong("hidden_size", f"a multiple of num_attention_heads ({heads}) where no head_dim is stated")
    return config.nullable_integer("head_dim", width // heads) or width // heads


def rms_norm(config: Config, offset: float = 0.0) -> RMSNormSpec:
    return RMSNormSpec(config.number("rms_norm_eps", 1e-6), offset)


def layer_norm(config: Config, name: str = "layer_norm_eps", *, bias: bool = True, offset: float = 0.0) -> LayerNormSpec:
    return LayerNormSpec(config.number(name, 1e-5), bias, offset=offset)


def slopes(heads: int, most: int = 8) -> tuple[float, ...]:
    """ALiBi's (Press et al. 2022): 2^(-most i / n) for i from 1 on, where n is the power of two from `heads` up; if heads are
    fewer, every second one first."""
    count = 1 << (heads - 1).bit_length()
    found = [2.0 ** (-most * i / count) for i in range(1, count + 1)]
    return tuple((found if count == heads else found[1::2] + found[::2])[:heads])


def attention(config: Config, *, rope: RopeSpec | None, scale: float | None = None, bias: bool = False,
              output_bias: bool | None = None, **more: Any) -> AttentionSpec:
    """By `num_attention_heads`, `num_key_value_heads`, `head_dim`. Unless given, the scale is 1 / sqrt(head size) and the
    output has a bias if the rest has. `more`: other fields."""
    heads, size = config.integer("num_attention_heads"), head_size(config)
    kv_heads = config.nullable_integer("num_key_value_heads", heads) or heads
    if heads % kv_heads:
        raise config.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    return AttentionSpec(config.integer("hidden_size"), heads, kv_heads, size, size**-0.5 if scale is None else scale, rope,
                         bias=bias, output_bias=bias if output_bias is None else output_bias, **more)


def latent_attention(config: Config, rope: RopeSpec) -> LatentAttentionSpec:
    """By `kv_lora_rank`, `q_lora_rank` (null: none), `qk_nope_head_dim`, `v_head_dim`; YaRN's `mscale_all_dim`."""
    keys = config.integer("qk_nope_head_dim")
    factor = rope.scaling.score_factor() if isinstance(rope.scaling, YarnScaling) else 1.0
    return LatentAttentionSpec(config.integer("hidden_size"), config.integer("num_attention_heads"),
                               config.integer("kv_lora_rank"), keys, config.integer("v_head_dim"),
                               (keys + rope.dim) ** -0.5 * factor, rope, RMSNormSpec(1e-6),
                               config.nullable_integer("q_lora_rank", 0), config.flag("attention_bias", False))


def gated_mlp(config: Config, *, activation: str = "hidden_act", bias: bool = False) -> MLPSpec:
    """By `intermediate_size` and the activation under the key `activation`."""
    return MLPSpec(config.integer("hidden_size"), config.integer("intermediate_size"), config.choice(activation, ACTIVATIONS),
                   bias=bias)


def plain_mlp(config: Config, *, activation: str = "hidden_act", inner: str = "intermediate_size", multiple: int | None = None,
              bias: bool = False) -> MLPSpec:
    """The same without a gate, its inner width under the key `inner`, by default `multiple` times the width."""
    width = config.integer("hidden_size")
    size = config.integer(inner) if multiple is None else config.integer(inner, multiple * width)
    return MLPSpec(width, size, config.choice(activation, {**ACTIVATIONS, "xielu": "xielu"}), gated=False, bias=bias)


def experts(config: Config, routing: Routing, *, inner: str = "moe_intermediate_size", shared_inner: int = 0,
            shared_gate: bool = False, activation: str = "hidden_act") -> ExpertsSpec:
    """Experts of the width under the key `inner`, without biases."""
    if routing.picks > routing.experts:
        raise ModelError(f"config.json asks for {routing.picks} experts for each token; there are {routing.experts}")
    return ExpertsSpec(config.integer("hidden_size"), config.integer(inner), routing,
                       Glu(config.choice(activation, ACTIVATIONS)), shared_inner=shared_inner, shared_gate=shared_gate)


def expert_count(config: Config) -> int:
    """Under the name that the family's config has for it."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return config.integer(next((name for name in names if name in config.values), names[0]))


def routing(config: Config, score: str = "softmax", **more: Any) -> Routing:
    """By `num_experts_per_tok` and the number of experts."""
    return Routing(expert_count(config), config.integer("num_experts_per_tok"), score, **more)


def some_experts(config: Config, score: str = "softmax", **shared: Any) -> list[MixerSpec]:
    """Each layer's feed-forward part: experts in every `decoder_sparse_step`-th that is not in `mlp_only_layers`."""
    layers, every = config.integer("num_hidden_layers"), config.integer("decoder_sparse_step", 1)
    dense = config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise config.wrong("mlp_only_layers", "a list of layers' numbers")
    mixture = experts(config, routing(config, score, normalise=config.flag("norm_topk_prob", False)), **shared)
    mlp = gated_mlp(config)
    return [mixture if (i + 1) % every == 0 and i not in dense else mlp for i in range(layers)]


def sigmoid_routing(config: Config) -> Routing:
    """DeepSeek V3's, which GLM, Kimi and dots share: corrected sigmoids, perhaps in groups, normalised and scaled."""
    experts, groups = expert_count(config), config.nullable_integer("n_group", 1) or 1
    if experts % groups:
        raise config.wrong("n_group", f"a divisor of the number of experts ({experts})")
    picked = config.nullable_integer("topk_group", 1) or 1
    if groups > 1 and not config.integer("num_experts_per_tok") <= experts // groups * picked <= experts:
        raise config.wrong("topk_group", f"at most {groups} (n_group), and so many that they hold num_experts_per_tok experts")
    return routing(config, "sigmoid", normalise=config.flag("norm_topk_prob", True), corrected=True, groups=groups,
                   scale=config.number("routed_scaling_factor", 1.0), picked_groups=picked)


def dense_then_experts(config: Config, routing: Callable[[Config], Routing] = sigmoid_routing, *,
                       bias: bool = False) -> list[MixerSpec]:
    """Feed-forward parts: `first_k_dense_replace` dense, then mixtures with `n_shared_experts`; or by `mlp_layer_types`.
    `bias`: of dense parts and shared experts."""
    first = config.integer("first_k_dense_replace", 0, least=0)
    sparse = config.layers("mlp_layer_types", "dense", "sparse", lambda layer: layer >= first)
    dense = gated_mlp(config, bias=bias)
    if not any(sparse):
        return [dense] * len(sparse)
    shared = config.nullable_integer("n_shared_experts", 0) * config.integer("moe_intermediate_size")
    mixture = replace(experts(config, routing(config), shared_inner=shared), shared_bias=bias)
    return [mixture if mixed else dense for mixed in sparse]


def draft_layers(config: Config) -> int:
    """Layers behind the last, which checkpoints store for drafting (multi-token prediction)."""
    return config.integer(next((name for name in ("num_nextn_predict_layers", "num_mtp_modules", "num_mtp_layers")
                                if name in config.values), "num_mtp_layers"), 0, least=0)


def sliding(attention: AttentionSpec, windows: Iterable[int], full: AttentionSpec | None = None) -> list[AttentionSpec]:
    """Each layer's attention, by its window. `full`: that of layers without a window, if it differs in more."""
    return [replace(attention, window=window) if window else full or attention for window in windows]


def layered(config: Config, attention: MixerSpec | Sequence[MixerSpec], mlp: MixerSpec | Sequence[MixerSpec], norm: NormSpec, *,
            pre: bool = True, post: bool = False, same: bool = False, beside: bool = False, scale: float = 1.0,
            **more: Any) -> ModelSpec:
    """A model of blocks of attention and a feed-forward part, which are of all layers or of each. `pre`, `post`: branches are
    normed before, as Llama's, and after. `same`: both read what the norm before attention gives; `beside`: each what its own
    norm makes of the block's input."""
    both = (part if isinstance(part, Sequence) else [part] * config.integer("num_hidden_layers") for part in (attention, mlp))
    before, after, blocks = norm if pre else None, norm if post else None, []
    for first, second in zip(*both, strict=True):
        branches = (BranchSpec(first, before, after, scale=scale),
                    BranchSpec(second, same=True) if same else BranchSpec(second, before, after, scale=scale))
        blocks.append(BlockSpec((branches,) if same or beside else ((branches[0],), (branches[1],))))
    return decoder(config, blocks, norm, **more)


def decoder(config: Config, blocks: Iterable[BlockSpec], norm: NormSpec, *, embedding: EmbeddingSpec | None = None,
            head: HeadSpec | None = None, max_positions: int | None = None, beyond: int = 0) -> ModelSpec:
    """The whole model, by `vocab_size`, `hidden_size`, `tie_word_embeddings` and `max_position_embeddings`.

    The context length is what the rope scaling makes of `max_position_embeddings`, unless given."""
    blocks = tuple(blocks)
    if max_positions is None:
        mixers = [mixer for block in blocks for mixer in block.mixers]
        ropes = [mixer.rope for mixer in mixers if isinstance(mixer, AttentionSpec | LatentAttentionSpec) and mixer.rope]
        max_positions = (ropes[0].scaling if ropes else RopeScaling()).reach(config.integer("max_position_embeddings"))
    return ModelSpec(architecture="", vocab_size=config.integer("vocab_size"), width=config.integer("hidden_size"),
                     max_positions=max_positions, blocks=blocks, norm=norm,
                     head=head or HeadSpec(config.flag("tie_word_embeddings", False)), embedding=embedding or EmbeddingSpec(),
                     beyond=beyond)
