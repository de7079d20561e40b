"""GPT-NeoX and Pythia, and in `LIKE` BLOOM and Falcon, whose matrices have the same names and hold queries, keys and values."""

import torch

from penstock.models.family import Config, EmbeddingSpec, Like, MLPSpec, ModelSpec, Rule, by_group, interleaved, parts, rope
from penstock.models.rules import Change

ARCHITECTURES = ("GPTNeoXForCausalLM",)
MODEL_TYPES = ("gpt_neox",)
DEFAULTS = {"hidden_act": "gelu", "max_position_embeddings": 2048}
_NAMES = {"input_layernorm.*": "attention.pre.*", "post_attention_layernorm.*": "mlp.pre.*", "mlp.dense_h_to_4h.*": "mlp.up.*",
          "mlp.dense_4h_to_h.*": "mlp.down.*"}
RULES = (
    *Rule.named("", {"[gpt_neox.]embed_in.weight": "embedding.weight", "[gpt_neox.]final_layer_norm.*": "norm.*",
        "embed_out.weight": "head.weight", "lm_head.weight": "head.weight"}, stem=""),
    *Rule.named("[gpt_neox.]layers.#.", {**_NAMES, "attention.query_key_value.*": ("attention.qkv.*", interleaved),
        "attention.dense.*": "attention.o.*", "attention.bias": None, "attention.masked_bias": None,
        "attention.rotary_emb.inv_freq": None}))


def _rules(change: Change, **more: str) -> tuple[Rule, ...]:
    """BLOOM's and Falcon's. `more`: other names of norms."""
    ends = {"word_embeddings.weight": "embedding.weight", "word_embeddings_layernorm.*": "embedding.norm.*", "ln_f.*": "norm.*"}
    return (*Rule.named("[transformer.]", ends, stem=""), Rule("lm_head.weight", "head.weight"),
            *Rule.named("[transformer.]h.#.", {**_NAMES, "self_attention.query_key_value.*": ("attention.qkv.*", change),
                "self_attention.dense.*": "attention.o.*", **{f"{name}.*": f"{target}.*" for name, target in more.items()}}))


def spec(config: Config) -> ModelSpec:
    """Attention and feed-forward side by side, partial rotation, LayerNorms and biases throughout."""
    bias, norm = config.flag("attention_bias", True), parts.layer_norm(config)
    turn = rope(config, parts.head_size(config), theta=config.number("rotary_emb_base", 10000.0),
                fraction=config.number("rotary_pct", 0.25))
    return parts.layered(config, parts.attention(config, rope=turn, bias=bias), parts.plain_mlp(config, bias=True), norm,
                         beside=config.flag("use_parallel_residual", True))


def bloom(config: Config) -> ModelSpec:
    """ALiBi, which has no longest context, a norm behind the embedding, LayerNorms and biases throughout."""
    config.absent("apply_residual_connection_post_layernorm")
    config = config.renamed(n_embed="hidden_size", n_head="num_attention_heads", n_layer="num_hidden_layers")
    width, norm = config.integer("hidden_size"), parts.layer_norm(config, "layer_norm_epsilon")
    attention = parts.attention(config, rope=None, bias=True, slopes=parts.slopes(config.integer("num_attention_heads")))
    return parts.layered(config, attention, MLPSpec(width, 4 * width, "gelu_tanh", gated=False, bias=True), norm,
                         embedding=EmbeddingSpec(norm=norm), max_positions=config.integer("seq_length", 1 << 20))


def _slopes(heads: int, size: int) -> tuple[float, ...]:
    """Falcon rounds them to bfloat16, and scales them together with the scores."""
    return tuple((torch.tensor(parts.slopes(heads)).bfloat16().double() * size**-0.5).tolist())


def falcon(config: Config) -> ModelSpec:
    """All generations: one or several groups of heads, ALiBi or rotation, branches side by side or not."""
    heads, size = config.integer("num_attention_heads"), parts.head_size(config)
    new, bias = config.flag("new_decoder_architecture", False), config.flag("bias", False)
    alibi = config.flag("alibi", False)
    norm = parts.layer_norm(config, "layer_norm_epsilon")
    kv_heads = config.integer("num_kv_heads", heads) if new else 1 if config.flag("multi_query", True) else heads
    attention = parts.attention(config.changed(num_key_value_heads=kv_heads), bias=bias,
                                rope=None if alibi else rope(config, size), slopes=_slopes(heads, size) if alibi else ())
    mlp = parts.plain_mlp(config, activation="activation", inner="ffn_hidden_size", multiple=4, bias=bias)
    beside = new and config.integer("num_ln_in_parallel_attn", 2) == 2
    return parts.layered(config, attention, mlp, norm, beside=beside,
                         same=not beside and (new or config.flag("parallel_attn", True)))


LIKE = (
    Like(("BloomForCausalLM",), ("bloom",), {"tie_word_embeddings": True}, bloom, _rules(interleaved)),
    Like(("FalconForCausalLM", "RWForCausalLM"), ("falcon", "RefinedWeb", "RefinedWebModel"),
         {"activation": "gelu", "max_position_embeddings": 2048, "tie_word_embeddings": True}, falcon,
         _rules(by_group, ln_attn="attention.pre", ln_mlp="mlp.pre")))
