"""GPT-J: branches side by side with one norm, interleaved partial rotation, a head with bias."""

from penstock.models.family import AttentionSpec, BlockSpec, BranchSpec, Config, HeadSpec, ModelSpec, RopeSpec, Rule, parts

ARCHITECTURES = ("GPTJForCausalLM",)
MODEL_TYPES = ("gptj",)
DEFAULTS = {"activation_function": "gelu_new", "n_positions": 2048}
_LAYER = "[transformer.]h.#."
RULES = (
    Rule("[transformer.]wte.weight", "embedding.weight"),
    *Rule.named(_LAYER, {"ln_1.*": "attention.pre.*", "attn.q_proj.weight": "attention.q.weight",
        "attn.k_proj.weight": "attention.k.weight", "attn.v_proj.weight": "attention.v.weight",
        "attn.out_proj.weight": "attention.o.weight", "mlp.fc_in.*": "mlp.up.*", "mlp.fc_out.*": "mlp.down.*"}),
    Rule("[transformer.]ln_f.*", "norm.*"),
    Rule("lm_head.*", "head.*"),
    *Rule.named(_LAYER, {"attn.bias": None, "attn.masked_bias": None}),
)


def spec(config: Config) -> ModelSpec:
    config = config.renamed(n_embd="hidden_size", n_head="num_attention_heads", n_layer="num_hidden_layers")
    width, heads, size = parts.even_heads(config)
    norm = parts.layer_norm(config, "layer_norm_epsilon")
    turn = RopeSpec(10000.0, config.nullable_integer("rotary_dim", 64) or size, interleaved=True)
    mlp = parts.plain_mlp(config, activation="activation_function", inner="n_inner", multiple=4, bias=True)
    attention = AttentionSpec(width, heads, heads, size, size**-0.5, turn)
    block = BlockSpec(((BranchSpec(attention, norm), BranchSpec(mlp, same=True)),))
    return parts.decoder(config, [block] * config.integer("num_hidden_layers"), norm,
                         head=HeadSpec(config.flag("tie_word_embeddings", False), bias=True),
                         max_positions=config.integer("n_positions"))
