"""GPT-BigCode (StarCoder, SantaCoder): GPT-2 in which all query heads share one key and value."""

from penstock.models.family import AttentionSpec, Config, EmbeddingSpec, HeadSpec, ModelSpec, Rule, by_group, parts

ARCHITECTURES = ("GPTBigCodeForCausalLM",)
MODEL_TYPES = ("gpt_bigcode",)
DEFAULTS = {"activation_function": "gelu_pytorch_tanh", "n_positions": 1024}
_LAYER = "[transformer.]h.#."
RULES = (
    Rule("[transformer.]wte.weight", "embedding.weight"),
    Rule("[transformer.]wpe.weight", "positions.weight"),
    *Rule.named(_LAYER, {"ln_1.*": "attention.pre.*", "attn.c_attn.*": ("attention.qkv.*", by_group),
        "attn.c_proj.*": "attention.o.*", "ln_2.*": "mlp.pre.*", "mlp.c_fc.*": "mlp.up.*", "mlp.c_proj.*": "mlp.down.*"}),
    Rule("[transformer.]ln_f.*", "norm.*"),
    Rule("lm_head.weight", "head.weight"),
    *Rule.named(_LAYER, {"attn.bias": None, "attn.masked_bias": None}),
)


def spec(config: Config) -> ModelSpec:
    config = config.renamed(n_embd="hidden_size", n_head="num_attention_heads", n_layer="num_hidden_layers")
    config.absent("add_cross_attention")
    width, heads, size = parts.even_heads(config)
    norm, positions = parts.layer_norm(config, "layer_norm_epsilon"), config.integer("n_positions")
    attention = AttentionSpec(width, heads, 1 if config.flag("multi_query", True) else heads, size,
                              size**-0.5 if config.flag("scale_attn_weights", True) else 1.0, bias=True, output_bias=True)
    mlp = parts.plain_mlp(config, activation="activation_function", inner="n_inner", multiple=4, bias=True)
    return parts.uniform(config, attention, mlp, norm,
                         embedding=EmbeddingSpec(positions=positions), max_positions=positions,
                         head=HeadSpec(config.flag("tie_word_embeddings", True)))
