"""GPT-2, GPT-BigCode (StarCoder, SantaCoder), GPT-Neo and GPT-J: LayerNorms and biases; learned positions but in GPT-J."""

from functools import partial

from penstock.models.family import AttentionSpec, Config, EmbeddingSpec, HeadSpec, Like, ModelSpec, RopeSpec, Rule, parts
from penstock.models.rules import Names, by_group, projections, transposed


def _rules(names: Names) -> tuple[Rule, ...]:
    """`names`: those of a layer besides its norms."""
    ends = {"[transformer.]wte.weight": "embedding.weight", "[transformer.]wpe.weight": "positions.weight",
            "[transformer.]ln_f.*": "norm.*", "lm_head.*": "head.*"}
    return (*Rule.named("", ends, stem=""),
            *Rule.named("[transformer.]h.#.", {"ln_1.*": "attention.pre.*", "ln_2.*": "mlp.pre.*", **names}))


ARCHITECTURES = ("GPT2LMHeadModel",)
MODEL_TYPES = ("gpt2",)
DEFAULTS = {"activation_function": "gelu_new", "max_position_embeddings": 1024, "tie_word_embeddings": True}
_MASKS = {"attn.bias": None, "attn.masked_bias": None}
# Matrices are kept as [inputs, outputs].
RULES = _rules({"attn.c_attn.*": ("attention.qkv.*", transposed), "attn.c_proj.*": ("attention.o.*", transposed),
                "mlp.c_fc.*": ("mlp.up.*", transposed), "mlp.c_proj.*": ("mlp.down.*", transposed), **_MASKS})
BIGCODE = _rules({"attn.c_attn.*": ("attention.qkv.*", by_group), "attn.c_proj.*": "attention.o.*", "mlp.c_fc.*": "mlp.up.*",
                  "mlp.c_proj.*": "mlp.down.*", **_MASKS})
NEO = _rules({**projections("attn.attention", "attention", "qkv"), "attn.attention.out_proj.*": "attention.o.*",
              "attn.attention.bias": None, "attn.attention.masked_bias": None, "mlp.c_fc.*": "mlp.up.*",
              "mlp.c_proj.*": "mlp.down.*"})
J = _rules({**projections("attn", "attention", "qkv"), "attn.out_proj.*": "attention.o.*", "mlp.fc_in.*": "mlp.up.*",
            "mlp.fc_out.*": "mlp.down.*", **_MASKS})


def spec(config: Config, *, joined: bool = False) -> ModelSpec:
    """`joined`: all query heads share one key and value, unless the config says otherwise."""
    config = _renamed(config)
    config.absent("add_cross_attention")
    scale = parts.head_size(config) ** -0.5 if config.flag("scale_attn_weights", True) else 1.0
    by_layer = not joined and config.flag("scale_attn_by_inverse_layer_idx", False)
    if joined and config.flag("multi_query", True):
        config = config.changed(num_key_value_heads=1)
    attentions = [parts.attention(config, rope=None, scale=scale / (layer if by_layer else 1), bias=True)
                  for layer in range(1, 1 + config.integer("num_hidden_layers"))]
    return _with_positions(config, attentions)


def _renamed(config: Config) -> Config:
    return config.renamed(n_embd="hidden_size", n_head="num_attention_heads", n_layer="num_hidden_layers",
                          n_positions="max_position_embeddings")


def _with_positions(config: Config, attentions: list[AttentionSpec]) -> ModelSpec:
    mlp = parts.plain_mlp(config, activation="activation_function", inner="n_inner", multiple=4, bias=True)
    return parts.layered(config, attentions, mlp, parts.layer_norm(config, "layer_norm_epsilon"),
                         embedding=EmbeddingSpec(positions=config.integer("max_position_embeddings")))


def neo(config: Config) -> ModelSpec:
    """Scores have no scale; some layers have a window, by attention_types: [[[kind, ...], repetitions], ...]."""
    config = config.renamed(num_heads="num_attention_heads", num_layers="num_hidden_layers", intermediate_size="n_inner")
    layers = config.integer("num_hidden_layers")
    given = config.values.get("attention_types") or [[["global", "local"], layers // 2]]
    windows = [config.integer("window_size", 256) if kind == "local" else 0
               for kinds, times in given for _ in range(times) for kind in kinds]
    if len(windows) != layers:
        raise config.wrong("attention_types", f"kinds for {layers} layers")
    attention = parts.attention(config, rope=None, scale=1.0, output_bias=True)
    return _with_positions(config, parts.sliding(attention, windows))


def j(config: Config) -> ModelSpec:
    """Branches side by side with one norm, interleaved partial rotation, a head with bias."""
    config = _renamed(config)
    size, dim = parts.head_size(config), config.nullable_integer("rotary_dim", 64)
    if dim > size:
        raise config.wrong("rotary_dim", f"at most {size}, the dimensions of a head")
    turn = RopeSpec(10000.0, dim or size, interleaved=True)
    mlp = parts.plain_mlp(config, activation="activation_function", inner="n_inner", multiple=4, bias=True)
    return parts.layered(config, parts.attention(config, rope=turn), mlp, parts.layer_norm(config, "layer_norm_epsilon"),
                         same=True, head=HeadSpec(config.flag("tie_word_embeddings", False), bias=True))


LIKE = (
    Like(("GPTBigCodeForCausalLM",), ("gpt_bigcode",), {**DEFAULTS, "activation_function": "gelu_pytorch_tanh"},
         partial(spec, joined=True), BIGCODE),
    Like(("GPTNeoForCausalLM",), ("gpt_neo",),
         {"activation_function": "gelu_new", "max_position_embeddings": 2048, "tie_word_embeddings": True}, neo, NEO),
    Like(("GPTJForCausalLM",), ("gptj",), {"activation_function": "gelu_new", "max_position_embeddings": 2048}, j, J))
