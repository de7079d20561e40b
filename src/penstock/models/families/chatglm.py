"""ChatGLM 2 and 3, and GLM-4 in its first form: GLM-4 with matrices merged and names of its own. GLM-4 (9B) and GLM-4-0414:
interleaved partial rotation; 0414 has norms after its branches, too."""

from penstock.models import family
from penstock.models.families import llama
from penstock.models.family import AttentionSpec, Config, Like, ModelSpec, RMSNormSpec, RopeSpec, Rule, parts, rules

ARCHITECTURES = ("ChatGLMModel", "ChatGLMForConditionalGeneration", "ChatGLMForCausalLM")
MODEL_TYPES = ("chatglm",)
RULES = (
    *Rule.named("transformer.", {"embedding.word_embeddings.weight": "embedding.weight", "rotary_pos_emb.inv_freq": None,
        "encoder.final_layernorm.weight": "norm.weight", "output_layer.weight": "head.weight"}, stem=""),
    *Rule.named("transformer.encoder.layers.#.", {"input_layernorm.weight": "attention.pre.weight",
        "self_attention.query_key_value.*": "attention.qkv.*", "self_attention.dense.*": "attention.o.*",
        "post_attention_layernorm.weight": "mlp.pre.weight", "mlp.dense_h_to_4h.*": "mlp.gate_up.*",
        "mlp.dense_4h_to_h.*": "mlp.down.*"}))
GLM4 = (*Rule.named("model.layers.#.", {
    "mlp.gate_up_proj.*": "mlp.gate_up.*", "post_self_attn_layernorm.weight": "attention.post.weight",
    "post_mlp_layernorm.weight": "mlp.post.weight"}), *rules.LLAMA)


def spec(config: Config) -> ModelSpec:
    config.absent("apply_residual_connection_post_layernorm", "add_bias_linear")
    config.only("rmsnorm", True, "true")
    norm = RMSNormSpec(config.number("layernorm_epsilon", 1e-5))
    width, heads, size = config.integer("hidden_size"), config.integer("num_attention_heads"), config.integer("kv_channels")
    kv_heads = config.integer("multi_query_group_num") if config.flag("multi_query_attention", False) else heads
    turn = RopeSpec(10000.0 * config.number("rope_ratio", 1.0), size // 2, interleaved=True)
    attention = AttentionSpec(width, heads, kv_heads, size, size**-0.5, turn, bias=config.flag("add_qkv_bias", False))
    config = config.changed(vocab_size=config.integer("padded_vocab_size"), num_hidden_layers=config.integer("num_layers"))
    return parts.layered(config, attention, family.MLPSpec(width, config.integer("ffn_hidden_size"), "silu"), norm,
                         head=family.HeadSpec(False), max_positions=config.integer("seq_length"))


def glm4(config: Config) -> ModelSpec:
    return llama.spec(config, fraction=0.5, interleaved=True, post=config.named("Glm4ForCausalLM", "glm4"))


LIKE = (Like(("GlmForCausalLM", "Glm4ForCausalLM"), ("glm", "glm4"),
             {"max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-07,
              "attention_bias": True, "attention_out_bias": False}, glm4, GLM4),)
