"""GPT-NeoX and Pythia: attention and feed-forward side by side, partial rotation, LayerNorms and biases throughout."""

from penstock.models.family import Config, ModelSpec, Rule, interleaved, parts, rope

ARCHITECTURES = ("GPTNeoXForCausalLM",)
MODEL_TYPES = ("gpt_neox",)
DEFAULTS = {"hidden_act": "gelu", "max_position_embeddings": 2048}
RULES = (
    Rule("[gpt_neox.]embed_in.weight", "embedding.weight"),
    *Rule.named("[gpt_neox.]layers.#.", {"input_layernorm.*": "attention.pre.*",
        "attention.query_key_value.*": ("attention.qkv.*", interleaved), "attention.dense.*": "attention.o.*",
        "post_attention_layernorm.*": "mlp.pre.*", "mlp.dense_h_to_4h.*": "mlp.up.*", "mlp.dense_4h_to_h.*": "mlp.down.*"}),
    Rule("[gpt_neox.]final_layer_norm.*", "norm.*"),
    Rule("embed_out.weight", "head.weight"),
    Rule("lm_head.weight", "head.weight"),
    *Rule.named("[gpt_neox.]layers.#.", {"attention.bias": None, "attention.masked_bias": None,
        "attention.rotary_emb.inv_freq": None}),
)


def spec(config: Config) -> ModelSpec:
    bias, norm = config.flag("attention_bias", True), parts.layer_norm(config)
    turn = rope(config, parts.head_size(config), theta=config.number("rotary_emb_base", 10000.0),
                fraction=config.number("rotary_pct", 0.25))
    return parts.layered(config, parts.attention(config, rope=turn, bias=bias), parts.plain_mlp(config, bias=True), norm,
                         beside=config.flag("use_parallel_residual", True))
