"""GGUF files: metadata and the places of tensors, every offset checked; and what these mean as a Hugging Face folder:
config.json, names of tensors, and how converters rearranged them.

Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian), also of keys. Names and
arrangements: llama.cpp's conversion scripts."""

import math
import mmap
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.core.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST = 1 << 24
"""Elements of an array, characters of a string, tensors: more is damage."""

SIZES = {0: ("f32", 1, 4), 1: ("f16", 1, 2), 2: ("q4_0", 32, 18), 3: ("q4_1", 32, 20), 6: ("q5_0", 32, 22), 7: ("q5_1", 32, 24),
         8: ("q8_0", 32, 34), 10: ("q2_k", 256, 84), 11: ("q3_k", 256, 110), 12: ("q4_k", 256, 144), 13: ("q5_k", 256, 176),
         14: ("q6_k", 256, 210), 16: ("iq2_xxs", 256, 66), 17: ("iq2_xs", 256, 74), 18: ("iq3_xxs", 256, 98),
         19: ("iq1_s", 256, 50), 20: ("iq4_nl", 32, 18), 21: ("iq3_s", 256, 110), 22: ("iq2_s", 256, 82),
         23: ("iq4_xs", 256, 136), 29: ("iq1_m", 256, 56), 30: ("bf16", 1, 2), 34: ("tq1_0", 256, 54), 35: ("tq2_0", 256, 66),
         39: ("mxfp4", 32, 17), 40: ("nvfp4", 64, 36)}
"""Types by number: name, columns and bytes of a block."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: its shape with the rows first, the name of its type, and its bytes [start, end) in the file."""

    name: str
    shape: tuple[int, ...]
    kind: str
    start: int
    end: int


@dataclass(frozen=True)
class File:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Entry]


class _Cursor:
    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def count(self, what: str) -> int:
        found: int = self.take("Q")
        if found > min(_MOST, len(self.data)):
            raise ValueError(f"{what} would be {found} long")
        return found

    def text(self) -> str:
        length = self.count("a string")
        found = self.data[self.at:self.at + length]
        if len(found) < length:
            raise ValueError("a string reaches beyond its end")
        self.at += length
        return found.decode("utf-8", "surrogateescape")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY and depth < 2:
            inner, count = self.take("I"), self.count("an array")
            if inner not in _SCALARS:
                return [self.value(inner, depth + 1) for _ in range(count)]
            form = f"<{count}{_SCALARS[inner]}"
            found = list(struct.unpack_from(form, self.data, self.at))
            self.at += struct.calcsize(form)
            return found
        if kind not in _SCALARS:
            raise ValueError(f"a value has type {kind}, which is not defined")
        return self.take(_SCALARS[kind])


def read(path: Path) -> File:
    """One file. ModelError says what is wrong with it."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(path, _Cursor(data))
    except (struct.error, ValueError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not a whole GGUF file: {error}; download it again") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from None


def _read(path: Path, cursor: _Cursor) -> File:
    if cursor.data[:4] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    cursor.at = 4
    version = cursor.take("I")
    if version not in (2, 3):
        raise ValueError(f"its version is {version}; possible are 2 and 3, little-endian")
    tensors, keys = cursor.count("the list of tensors"), cursor.count("the metadata")
    metadata = {}
    for _ in range(keys):
        name = cursor.text()
        metadata[name] = cursor.value(cursor.take("I"))
    listed = []
    for _ in range(tensors):
        name = cursor.text()
        dims = cursor.take("I")
        if dims > 4:
            raise ValueError(f"tensor {name} has {dims} dimensions")
        shape = tuple(cursor.take("Q") for _ in range(dims))[::-1]
        listed.append((name, shape, cursor.take("I"), cursor.take("Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"its alignment is {alignment!r}")
    base = -(-cursor.at // alignment) * alignment
    found: dict[str, Entry] = {}
    for name, shape, number, offset in listed:
        if number not in SIZES:
            raise ModelError(f"{path}: tensor {name} has type {number}, which Penstock does not know; it knows "
                             f"{', '.join(kind for kind, _, _ in SIZES.values())}")
        kind, columns, nbytes = SIZES[number]
        if not shape or shape[-1] % columns:
            raise ValueError(f"tensor {name} {list(shape)} is not made of whole blocks of {kind}")
        start = base + offset
        end = start + math.prod(shape) // columns * nbytes
        if end > len(cursor.data):
            raise ValueError(f"tensor {name} ends at byte {end}, the file has {len(cursor.data)} (cut short)")
        found[name] = Entry(name, shape, kind, start, end)
    return File(path, metadata, found)


_SPLIT = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf")


def siblings(path: Path) -> list[Path]:
    """All files of a model that may be split, in order, given one of them. ModelError names those that are missing."""
    found = _SPLIT.fullmatch(path.name)
    if found is None:
        return [path]
    paths = [path.with_name(f"{found[1]}-{i:05}-of-{found[3]}.gguf") for i in range(1, int(found[3]) + 1)]
    missing = [one.name for one in paths if not one.is_file()]
    if missing:
        raise ModelError(f"{path.parent} lacks {', '.join(missing[:4])} of a model that is split into {int(found[3])} files; "
                         "download them")
    return paths


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
    keys = "attention.key_length", "embedding_length", "attention.head_count", "rope.dimension_count"
    given: list[int] = [value(key) or 0 for key in keys]
    if not all(isinstance(one, int) for one in given):
        raise ModelError(f"the metadata {', '.join(keys)} is {given}; possible is one whole number each, for all layers")
    return given[0] or given[1] // (given[2] or 1)


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
    "gemma": Architecture("GemmaForCausalLM", norms_up=True),
    "starcoder2": Architecture("Starcoder2ForCausalLM", {**_LLAMA, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}, keys={
        "attention.layer_norm_epsilon": "norm_epsilon", "attention.sliding_window": "sliding_window"}),
    "glm4": Architecture("Glm4ForCausalLM", {**_LLAMA, "ffn_up": "mlp.gate_up_proj", "post_attention_norm":
        "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}),
    "command-r": Architecture("CohereForCausalLM", keys={
        "attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"}),
    "gpt2": Architecture("GPT2LMHeadModel", {
        "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2", "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj"}, {"token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f", "output": "lm_head"},
        "h", more=_gpt2)}

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
    size, rotated = _head_size(value), value("rope.dimension_count")
    part = {"partial_rotary_factor": rotated / size} if size and rotated and rotated != size else {}
    config = {"head_dim": size, **part, **config}
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
