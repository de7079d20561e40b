"""Translates a GGUF file's metadata and names into those of a Hugging Face folder: config.json, names of tensors, and how
converters rearranged them. Keys: ggml's gguf.md; names and arrangements: llama.cpp's conversion scripts."""

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.checkpoint.gguf import Entry, File
from penstock.core.errors import ModelError

_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LLAMA = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
          "attn_v": "self_attn.v_proj", "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj",
          "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm",
          "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_EXPERTS = {"ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.@.gate_proj", "ffn_up_exps": "mlp.experts.@.up_proj",
            "ffn_down_exps": "mlp.experts.@.down_proj", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
_MIXTRAL = {"ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_exps": "block_sparse_moe.experts.@.w1",
            "ffn_up_exps": "block_sparse_moe.experts.@.w3", "ffn_down_exps": "block_sparse_moe.experts.@.w2"}
_SANDWICH = {"post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
             "post_ffw_norm": "post_feedforward_layernorm"}

Values = Callable[[str], Any]
"""A value of the architecture's metadata by its key without prefix, or None."""


@dataclass(frozen=True)
class Architecture:
    """A `general.architecture`, and the family that serves it."""

    family: str
    """As config.json names it."""
    layers: Mapping[str, str] = field(default_factory=lambda: _LLAMA)
    """Names of a block's tensors, and ours behind `prefix` and the layer's number."""
    ends: Mapping[str, str] = field(default_factory=lambda: _ENDS)
    prefix: str = "model.layers"
    keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of its own, and config.json's."""
    more: Callable[[Values], dict[str, Any]] = lambda value: {}  # noqa: ARG005 (the default adds nothing)
    permuted: bool = False
    """The rows of q and k are in the order of rotations of neighbours."""
    norms_up: bool = False
    """Norms are stored with 1 added."""


def _gemma2(value: Values) -> dict[str, Any]:
    # Of the 27B alone the scale is not that of the head's size.
    size = value("embedding_length") // value("attention.head_count") if value("block_count") == 46 else _head_size(value)
    return {"query_pre_attn_scalar": size}


def _gemma3(value: Values) -> dict[str, Any]:
    size = value("embedding_length") // value("attention.head_count") if value("block_count") == 62 else _head_size(value)
    scaling = value("rope.scaling.factor")
    full = {"rope_theta": value("rope.freq_base") or 1e6}
    if scaling and value("rope.scaling.type") == "linear":
        full |= {"rope_type": "linear", "factor": scaling}
    local = {"rope_theta": value("rope.freq_base_swa") or 1e4}
    return {"query_pre_attn_scalar": size, "rope_parameters": {"full_attention": full, "sliding_attention": local},
            **({"sliding_window_pattern": 1} if not value("attention.sliding_window") else {})}


def _gpt2(value: Values) -> dict[str, Any]:
    return {"n_embd": value("embedding_length"), "n_head": value("attention.head_count"), "n_layer": value("block_count"),
            "n_positions": value("context_length"), "layer_norm_epsilon": value("attention.layer_norm_epsilon"),
            "n_inner": value("feed_forward_length")}


def _head_size(value: Values) -> int:
    found: int = value("attention.key_length") or value("embedding_length") // value("attention.head_count")
    return found


_SOFTCAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
             "attention.sliding_window": "sliding_window"}
_PICKS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
          "expert_feed_forward_length": "moe_intermediate_size",
          "expert_shared_feed_forward_length": "shared_expert_intermediate_size"}

ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", permuted=True),
    "llama with experts": Architecture("MixtralForCausalLM", {**_LLAMA, **_MIXTRAL}, permuted=True, keys={
        "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", {**_LLAMA, **_EXPERTS}, keys=_PICKS),
    "olmoe": Architecture("OlmoeForCausalLM", {**_LLAMA, **_EXPERTS}, keys=_PICKS),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", {**_LLAMA, **_EXPERTS}, keys=_PICKS,
                             more=lambda _: {"norm_topk_prob": True}),
    "gemma2": Architecture("Gemma2ForCausalLM", {**_LLAMA, **_SANDWICH}, keys=_SOFTCAPS, more=_gemma2, norms_up=True),
    "gemma3": Architecture("Gemma3ForCausalLM", {**_LLAMA, **_SANDWICH}, keys=_SOFTCAPS, more=_gemma3, norms_up=True),
    "phi3": Architecture("Phi3ForCausalLM", {**_LLAMA, "ffn_up": "mlp.gate_up_proj"},
                         more=lambda value: {"sliding_window": value("attention.sliding_window")}),
    "granite": Architecture("GraniteForCausalLM", permuted=True, keys={
        "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}),
    "olmo2": Architecture("Olmo2ForCausalLM", {**_LLAMA, **_SANDWICH}),
    "smollm3": Architecture("SmolLM3ForCausalLM", permuted=True),
    "gpt2": Architecture("GPT2LMHeadModel", {
        "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2", "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj"}, {"token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f", "output": "lm_head"},
        "h", more=_gpt2),
}

COMMON = {"context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
          "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
          "attention.head_count_kv": "num_key_value_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
          "attention.key_length": "head_dim", "rope.freq_base": "rope_theta"}
_IGNORED = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight|.*\.attn_rot_embd")
"""Tables of rotations: they are read into the config."""


def architecture(metadata: Mapping[str, Any]) -> Architecture:
    """ModelError for one that is not known."""
    name = str(metadata.get("general.architecture"))
    if metadata.get(f"{name}.expert_count") and f"{name} with experts" in ARCHITECTURES:
        name = f"{name} with experts"
    if name not in ARCHITECTURES:
        raise ModelError(f"general.architecture is {name!r}, which Penstock does not read from GGUF files; it reads "
                         f"{', '.join(sorted(ARCHITECTURES))}")
    return ARCHITECTURES[name]


def renamed(arch: Architecture, entry: Entry) -> list[tuple[str, Entry]]:
    """A tensor under the names of a Hugging Face folder: one for each expert of a stack, none for tables of rotations."""
    if _IGNORED.fullmatch(entry.name):
        return []
    stem, _, suffix = entry.name.rpartition(".")
    block = re.fullmatch(r"blk\.([0-9]+)\.(\w+)", stem)
    ours = arch.ends.get(stem) if block is None else arch.layers.get(block[2])
    if ours is None:
        raise ModelError(f"tensor {entry.name} {list(entry.shape)} has no place in {arch.family}")
    name = f"{ours}.{suffix}" if block is None else f"{arch.prefix}.{block[1]}.{ours}.{suffix}"
    if "@" not in ours:
        return [(name, entry)]
    count = entry.shape[0]
    each = (entry.end - entry.start) // count
    return [(name.replace("@", str(i)), Entry(entry.name, entry.shape[1:], entry.kind, entry.start + i * each,
                                              entry.start + (i + 1) * each)) for i in range(count)]


def config_of(files: Sequence[File]) -> dict[str, Any]:
    """config.json, with `quantization_config` for the reader `quant/dialects/gguf.py`. ModelError: what cannot be run."""
    metadata = files[0].metadata
    arch, prefix = architecture(metadata), metadata["general.architecture"]
    tensors = {name: (file, entry) for file in files for name, entry in file.tensors.items()}
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{files[0].path} has no token_embd.weight: it holds no language model (a vocabulary, or an adapter?)")

    def value(key: str) -> Any:
        found = metadata.get(f"{prefix}.{key}")
        if isinstance(found, list) and found and all(one == found[0] for one in found):
            return found[0]
        return found

    vocab = tensors["token_embd.weight"][1].shape[0]
    config: dict[str, Any] = {"architectures": [arch.family], "vocab_size": vocab, "tie_word_embeddings":
                              "output.weight" not in tensors, "dtype": _dtype(entry for _, entry in tensors.values())}
    for key, name in {**COMMON, **arch.keys}.items():
        if value(key) is not None:
            config[name] = value(key)
    config |= _rotation(value, tensors)
    config |= arch.more(value)
    kinds, vectors = {}, False
    for _, entry in tensors.values():
        for name, one in renamed(arch, entry):
            vectors = vectors or name.endswith("q_proj.bias")
            if one.kind not in ("f32", "f16", "bf16"):
                kinds[name.removesuffix(".weight")] = one.kind
    config["attention_bias"] = vectors
    heads = [config.get("num_attention_heads"), config.get("num_key_value_heads", config.get("num_attention_heads"))]
    config["quantization_config"] = {"quant_method": "gguf", "kinds": kinds, "permuted": heads if arch.permuted else None,
                                     "norms_up": arch.norms_up}
    for role in ("bos", "eos", "padding"):
        token = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if token is not None:
            config[f"{role.replace('padding', 'pad')}_token_id"] = token
    return config


def _dtype(entries: Any) -> str:
    """The dtype to compute in: of a plain file its own; bfloat16 beside quantized weights, whose range it surely has."""
    kinds = {entry.kind for entry in entries if len(entry.shape) > 1}
    plain = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
    return plain[next(iter(kinds))] if len(kinds) == 1 and kinds <= plain.keys() else "bfloat16"


def _rotation(value: Values, tensors: Mapping[str, tuple[File, Entry]]) -> dict[str, Any]:
    """Scalings: as keys, or as a table of divisors for each frequency (Llama 3, LongRoPE)."""
    kind, factor = value("rope.scaling.type"), value("rope.scaling.factor")
    original = value("rope.scaling.original_context_length") or value("context_length")
    tables = {name: _floats(*tensors[f"{name}.weight"]) for name in ("rope_freqs", "rope_factors_long", "rope_factors_short")
              if f"{name}.weight" in tensors}
    if "rope_freqs" in tables:
        scaling = {"rope_type": "longrope", "short_factor": tables["rope_freqs"], "long_factor": tables["rope_freqs"],
                   "attention_factor": 1.0, "factor": 1.0, "original_max_position_embeddings": original}
    elif "rope_factors_long" in tables:
        scaling = {"rope_type": "longrope", "short_factor": tables["rope_factors_short"], "factor": 1.0,
                   "long_factor": tables["rope_factors_long"], "attention_factor": value("rope.scaling.attn_factor") or 1.0,
                   "original_max_position_embeddings": original}
        return {"rope_scaling": scaling, "original_max_position_embeddings": original}
    elif kind == "linear" and factor:
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn" and factor:
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    elif kind in (None, "none", "linear", "yarn", "longrope"):
        return {}
    else:
        raise ModelError(f"rope.scaling.type is {kind!r}; possible are none, linear, yarn and longrope")
    return {"rope_scaling": scaling}


def _floats(file: File, entry: Entry) -> list[float]:
    if entry.kind != "f32":
        raise ModelError(f"{file.path}: tensor {entry.name} is {entry.kind}; possible is f32")
    with file.path.open("rb") as opened:
        opened.seek(entry.start)
        return list(struct.unpack(f"<{(entry.end - entry.start) // 4}f", opened.read(entry.end - entry.start)))
