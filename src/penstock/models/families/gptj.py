"""GPT-J: branches side by side with one norm, interleaved partial rotation, a head with bias."""

from penstock.models.family import AttentionSpec, BlockSpec, BranchSpec, Config, HeadSpec, ModelSpec, RopeSpec, Rule, parts

ARCHITECTURES = ("GPTJForCausalLM",)
MODEL_TYPES = ("gptj",)
DEFAULTS = {"activation_function": "gelu_new", "n_positions": 2048}
_LAYER = "[transformer.]h.#."
RULES = (
    Rule("[transformer.]wte.weight", "embedding.weight"),
    Rule(_LAYER + "ln_1.*", "blocks.#.attention.pre.*"),
    Rule(_LAYER + "attn.q_proj.weight", "blocks.#.attention.q.weight"),
    Rule(_LAYER + "attn.k_proj.weight", "blocks.#.attention.k.weight"),
    Rule(_LAYER + "attn.v_proj.weight", "blocks.#.attention.v.weight"),
    Rule(_LAYER + "attn.out_proj.weight", "blocks.#.attention.o.weight"),
    Rule(_LAYER + "mlp.fc_in.*", "blocks.#.mlp.up.*"),
    Rule(_LAYER + "mlp.fc_out.*", "blocks.#.mlp.down.*"),
    Rule("[transformer.]ln_f.*", "norm.*"),
    Rule("lm_head.*", "head.*"),
    Rule(_LAYER + "attn.bias", None),
    Rule(_LAYER + "attn.masked_bias", None),
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
