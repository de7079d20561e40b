"""GPT-2: learned positions, LayerNorms, biases, matrices kept as [inputs, outputs]."""

from penstock.models.family import AttentionSpec, Config, EmbeddingSpec, HeadSpec, ModelSpec, Rule, parts, transposed

ARCHITECTURES = ("GPT2LMHeadModel",)
MODEL_TYPES = ("gpt2",)
DEFAULTS = {"activation_function": "gelu_new", "n_positions": 1024}
RULES = (
    Rule("[transformer.]wte.weight", "embedding.weight"),
    Rule("[transformer.]wpe.weight", "positions.weight"),
    *Rule.named("[transformer.]h.#.", {"ln_1.*": "attention.pre.*", "attn.c_attn.*": ("attention.qkv.*", transposed),
        "attn.c_proj.*": ("attention.o.*", transposed), "ln_2.*": "mlp.pre.*", "mlp.c_fc.*": ("mlp.up.*", transposed),
        "mlp.c_proj.*": ("mlp.down.*", transposed), "attn.bias": None, "attn.masked_bias": None}),
    Rule("[transformer.]ln_f.*", "norm.*"),
    Rule("lm_head.weight", "head.weight"),
)


def spec(config: Config) -> ModelSpec:
    config = config.renamed(n_embd="hidden_size", n_head="num_attention_heads", n_layer="num_hidden_layers")
    config.absent("add_cross_attention")
    width, heads, size = parts.even_heads(config)
    norm, positions = parts.layer_norm(config, "layer_norm_epsilon"), config.integer("n_positions")
    scale = size**-0.5 if config.flag("scale_attn_weights", True) else 1.0
    by_layer = config.flag("scale_attn_by_inverse_layer_idx", False)
    mlp = parts.plain_mlp(config, activation="activation_function", inner="n_inner", multiple=4, bias=True)
    attentions = [AttentionSpec(width, heads, heads, size, scale / (layer if by_layer else 1), bias=True, output_bias=True)
                  for layer in range(1, 1 + config.integer("num_hidden_layers"))]
    return parts.decoder(config, [parts.pre_norm_block(attention, mlp, norm) for attention in attentions], norm,
                         embedding=EmbeddingSpec(positions=positions), max_positions=positions,
                         head=HeadSpec(config.flag("tie_word_embeddings", True)))
