"""GGUF files: metadata and the places of tensors, every offset checked; and what these mean as a Hugging Face folder:
config.json, names of tensors, and how converters rearranged them.

Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian), also of keys. Names and
arrangements: llama.cpp's conversion scripts."""

import math
import mmap
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    if (version := cursor.take("I")) not in (2, 3):
        raise ValueError(f"its version is {version}; possible are 2 and 3, little-endian")
    tensors, keys = cursor.count("the list of tensors"), cursor.count("the metadata")
    metadata: dict[str, Any] = {}
    found: dict[str, Entry] = {}
    for _ in range(keys):
        key, kind = cursor.text(), cursor.take("I")
        at = cursor.at + struct.calcsize("<IQ")
        metadata[key] = cursor.value(kind)
        for i, one in enumerate(metadata[key] if key in _XIELU and kind == _ARRAY else ()):
            if isinstance(one, float) and cursor.at - at == 4 * len(metadata[key]):
                found[f"blk.{i}.{key}"] = Entry(f"blk.{i}.{key}", (1,), "f32", at + 4 * i, at + 4 * i + 4)
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
    for name, shape, number, offset in listed:
        if number not in SIZES:
            raise ModelError(f"{path}: tensor {name} has type {number}, which Penstock does not know; it knows "
                             f"{', '.join(kind for kind, _, _ in SIZES.values())}")
        kind, columns, nbytes = SIZES[number]
        if name in found:
            raise ValueError(f"tensor {name} is there twice")
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
    if missing := [one.name for one in paths if not one.is_file()]:
        raise ModelError(f"{path.parent} lacks {', '.join(missing[:4])} of a model that is split into {int(found[3])} files; "
                         "download them")
    return paths


BLOCK = {
    **{f"attn_{name}": f"attention.{name}" for name in (
        "q", "k", "v", "qkv", "q_norm", "k_norm", "gate", "q_a", "q_b", "kv_b")},
    **{f"ffn_{name}{end}": f"mlp.{part}{name}" for name in ("gate", "up", "down")
       for end, part in (("", ""), ("_exps", "experts.@."), ("_shexp", "shared."))},
    "attn_norm": "attention.pre", "attn_output": "attention.o", "post_attention_norm": "attention.post", "ffn_norm": "mlp.pre",
    "post_ffw_norm": "mlp.post", "ffn_gate_inp": "mlp.router", "ffn_gate_inp_shexp": "mlp.shared_gate",
    "attn_q_a_norm": "attention.q_norm", "attn_kv_a_mqa": "attention.kv_a", "attn_kv_a_norm": "attention.kv_norm",
    "attn_k_b.weight": "attention.kv_b.k", "attn_v_b.weight": "attention.kv_b.v", "attn_sinks.weight": "attention.sinks",
    "ffn_gate_up_exps": "mlp.experts.gate_up", "exp_probs_b.bias": "mlp.correction",
    "ffn_down_exps.bias": "mlp.experts.down.bias"}
"""Names of a block's tensors, perhaps with their endings, and of the parameters that they are."""
ENDS = {"token_embd": "embedding", "token_embd_norm": "embedding.norm", "position_embd": "positions", "output_norm": "norm",
         "output": "head", "per_layer_token_embd": "inputs.table", "per_layer_model_proj": "inputs.projection",
         "per_layer_proj_norm": "inputs.norm", "altup_proj": "streams.entry.@", "altup_unembd_proj": "streams.exit.@"}
_MERGED = {"ffn_up": "mlp.gate_up"}
_SECOND = {"post_attention_norm": "mlp.pre"}
_DELTA = {**_SECOND, "attn_qkv": "attention.input", "attn_gate": "attention.z", "ssm_beta": "attention.b",
          "ssm_alpha": "attention.a", "ssm_out": "attention.out", "ssm_conv1d": "attention.conv", "ssm_norm": "attention.norm",
          "ssm_a": "attention.decay", "ssm_dt.bias": "attention.step", "ssm_ba": "attention.b attention.a",
          "ssm_in": "attention.input attention.z"}
"""Delta nets. Of two names each takes some rows of the tensor."""
_GEMMAS = {
    "inp_gate": "inputs.up", "proj": "inputs.down", "post_norm": "inputs.post", "layer_output_scale.weight": "factor",
    "altup_router_norm.weight": "streams.norm", "altup_router.weight": "streams.router",
    "altup_predict_coef.weight": "streams.predict", "altup_correct_coef.weight": "streams.correct",
    "altup_correct_scale.weight": "streams.scale", "laurel_l": "laurel.up", "laurel_r": "laurel.down",
    "laurel_post_norm": "laurel.post", "ffn_gate_inp": "mixture.router", "ffn_gate_inp.scale": "mixture.router_norm.weight",
    "ffn_down_exps.scale": "mixture.factors", "ffn_gate_up_exps": "mixture.experts.gate_up",
    "ffn_down_exps": "mixture.experts.@.down", "pre_ffw_norm_2": "mixture.experts_norm", "post_ffw_norm_1": "mlp.post",
    "post_ffw_norm_2": "mixture.post"}
"""Gemma 3n's and 4's."""
_ROWS = {"per_layer_token_embd.weight": "vocab_size_per_layer_input", "blk.0.laurel_l.weight": "laurel_rank"}
"""Tensors whose rows no metadata counts, and config.json's keys for them."""
_TABLES = "rope_freqs", "rope_factors_long", "rope_factors_short"
_TWO_NORMS = {"attn_norm": "mlp.pre", "attn_norm_2": "attention.pre"}
_XIELU = tuple(f"xielu.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps"))
"""Metadata with a number for each block, which are parameters."""

Values = Callable[[str], Any]
"""A value of the architecture's metadata by its key without prefix, or a table of rotations by its name; or None."""


@dataclass(frozen=True)
class Architecture:
    """A `general.architecture`, and the family that serves it."""

    family: str
    """As config.json names it."""
    own: Mapping[str, str] = field(default_factory=dict)
    """Names of a block's tensors that mean something else than in most."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of its own, and config.json's."""
    more: Callable[[Values], dict[str, Any]] = lambda value: {}  # noqa: ARG005 (the default adds nothing)
    permuted: bool = False
    """The rows of q and k are in the order of rotations of neighbours."""
    norms_up: bool = False
    """Norms are stored with 1 added."""
    blocks: int = 1 << 30
    """Blocks but those behind the last, which draft."""

    def place(self, name: str) -> str | None:
        """A tensor's parameter, with @ for an expert's number; None: there is none."""
        found = re.fullmatch(r"blk\.([0-9]+)\.(.+)", name)
        table, rest = (ENDS, name) if found is None else ({**BLOCK, **self.own}, found[2])
        stem, _, suffix = rest.rpartition(".")
        ours = table.get(rest) or (table[stem] + f".{suffix}" if stem in table else None)
        return ours if found is None or ours is None else f"blocks.{found[1]}.{ours}"


def _gemma(value: Values) -> dict[str, Any]:
    # Of the 27B alone (46 layers in Gemma 2, 62 in Gemma 3) the scale is not that of the head's size.
    return {"query_pre_attn_scalar": value("embedding_length") // value("attention.head_count")
            if value("block_count") in (46, 62) else _head_size(value)}


def _gemma3(value: Values) -> dict[str, Any]:
    full, scaling = {"rope_theta": value("rope.freq_base") or 1e6}, value("rope.scaling.factor")
    if scaling and value("rope.scaling.type") == "linear":
        full |= {"rope_type": "linear", "factor": scaling}
    return {**_gemma(value), "rope_parameters": {
        "full_attention": full, "sliding_attention": {"rope_theta": value("rope.freq_base_swa") or 1e4}},
            **({"sliding_window_pattern": 1} if not value("attention.sliding_window") else {})}


def _gemma3n(value: Values) -> dict[str, Any]:
    found, scales = _gemma3(value), value("activation_sparsity_scale")
    if scales is not None:
        scales = scales if isinstance(scales, list) else [scales] * value("block_count")
        # The file has the normal distribution's quantiles.
        found["activation_sparsity_pattern"] = [(1 + math.erf(scale / math.sqrt(2))) / 2 for scale in scales]
    return {**found, "model_type": "gemma3n_text"}


def _gemma4(value: Values) -> dict[str, Any]:
    local, divisors = value("attention.sliding_window_pattern"), value("rope_freqs") or [1.0]
    if not {*divisors} <= {1.0, max(divisors)} or 1.0 < max(divisors) < 1e29:
        raise ModelError("rope_freqs.weight has divisors other than 1 and 1e30, which gemma4's rotation of a part has not")
    heads, size, inner = (value(key) for key in ("attention.head_count_kv", "attention.key_length", "feed_forward_length"))
    wide = isinstance(inner, list)
    near, far = (heads[local.index(one)] for one in (True, False)) if isinstance(heads, list) else (heads, heads)
    turns = {"sliding_attention": {"rope_type": "default", "rope_theta": value("rope.freq_base_swa") or 1e4},
             "full_attention": {"rope_type": "proportional", "rope_theta": value("rope.freq_base") or 1e6,
                                "partial_rotary_factor": divisors.count(1.0) / len(divisors)}}
    return {"model_type": "gemma4_text", "rope_parameters": turns, "num_key_value_heads": near,
            "enable_moe_block": bool(value("expert_count")), "top_k_experts": value("expert_used_count"),
            "num_global_key_value_heads": far, "head_dim": value("attention.key_length_swa") or size, "global_head_dim": size,
            "intermediate_size": min(inner) if wide else inner, "use_double_wide_mlp": wide}


def _deepseek(value: Values) -> dict[str, Any]:
    """In newer files keys and values are those of one head, the latents; lengths of whole heads have keys of their own."""
    turned, groups = value("rope.dimension_count"), value("expert_group_count") or 1
    keys, values = (value(f"attention.{name}_length_mla") or value(f"attention.{name}_length") for name in ("key", "value"))
    found = {"qk_rope_head_dim": turned, "qk_nope_head_dim": keys - turned, "v_head_dim": values, "n_group": groups,
             "q_lora_rank": value("attention.q_lora_rank"), "norm_topk_prob": bool(value("expert_weights_norm")),
             "partial_rotary_factor": 1.0, **_yarn(value, **dict.fromkeys(
                 ("mscale", "mscale_all_dim"), 10 * (value("rope.scaling.yarn_log_multiplier") or 0) or None))}
    if value("expert_gating_func") != 2 and value("expert_count"):
        found |= {"architectures": ["DeepseekV2ForCausalLM"], "topk_method": "group_limited_greedy" if groups > 1 else "greedy"}
    return found


def _delta(value: Values) -> dict[str, Any]:
    heads, every = value("ssm.time_step_rank"), value("full_attention_interval") or 4
    return {"linear_num_key_heads": value("ssm.group_count"), "linear_num_value_heads": heads,
            "linear_key_head_dim": value("ssm.state_size"), "linear_value_head_dim": value("ssm.inner_size") // heads,
            "linear_conv_kernel_dim": value("ssm.conv_kernel"), "full_attention_interval": every}


def _yarn(value: Values, **more: Any) -> dict[str, Any]:
    """YaRN, perhaps with more than its usual numbers; values of None are left out."""
    found = {"rope_type": "yarn", "factor": value("rope.scaling.factor"), "beta_fast": value("rope.scaling.yarn_beta_fast"),
             "beta_slow": value("rope.scaling.yarn_beta_slow"), "original_max_position_embeddings": value(
                 "rope.scaling.original_context_length") or value("context_length"), **more}
    found = {name: one for name, one in found.items() if one is not None}
    return {"rope_parameters": found} if value("rope.scaling.type") == "yarn" and "factor" in found else {}


def _minicpm(value: Values) -> dict[str, Any]:
    width, layers = value("embedding_length"), value("block_count")
    return {"scale_emb": value("embedding_scale") or 12.0, "dim_model_base": width / (value("logit_scale") or width / 256),
            "scale_depth": (value("residual_scale") or 1.4 / layers**0.5) * layers**0.5}


def _head_size(value: Values) -> int:
    keys = "attention.key_length", "embedding_length", "attention.head_count", "rope.dimension_count"
    given: list[int] = [value(key) or 0 for key in keys]
    if not all(isinstance(one, int) for one in given):
        raise ModelError(f"the metadata {', '.join(keys)} is {given}; possible is one whole number each, for all layers")
    return given[0] or given[1] // (given[2] or 1)


_SCALES = {"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
           "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}

ARCHITECTURES = {
    **{name: Architecture(f"{family}ForCausalLM") for name, family in {
        "qwen2": "Qwen2", "qwen2vl": "Qwen2", "qwen2moe": "Qwen2Moe", "qwen3": "Qwen3", "qwen3vl": "Qwen3", "olmoe": "Olmoe",
        "phi2": "Phi", "phimoe": "Phimoe", "starcoder2": "Starcoder2", "minimax-m2": "MiniMaxM2", "dots1": "Dots1",
        "hunyuan-dense": "HunYuanDenseV1", "ernie4_5": "Ernie4_5", "jais2": "Jais2", "exaone": "Llama",
        "exaone4": "Exaone4", "gptneox": "GPTNeoX", "stablelm": "StableLm", "command-r": "Cohere",
        "cohere2": "Cohere2", "bloom": "Bloom", "hunyuan-moe": "HunYuanMoEV1", "ernie4_5-moe": "Ernie4_5_Moe",
        "exaone-moe": "ExaoneMoe"}.items()},
    **{name: Architecture(f"{family}ForCausalLM", permuted=True) for name, family in {
        "olmo": "Olmo", "smollm3": "SmolLM3", "arcee": "Arcee", "internlm2": "InternLM2",
        "baichuan": "Baichuan", "xverse": "Llama"}.items()},
    "llama": Architecture("LlamaForCausalLM", permuted=True, more=lambda value: {
        "architectures": ["MixtralForCausalLM"]} if value("expert_count") else {}),
    **dict.fromkeys(("qwen3moe", "qwen3vlmoe"), Architecture("Qwen3MoeForCausalLM", more=lambda _: {"norm_topk_prob": True})),
    "gemma": Architecture("GemmaForCausalLM", norms_up=True), "nemotron": Architecture("NemotronForCausalLM", norms_up=True),
    "gemma2": Architecture("Gemma2ForCausalLM", more=_gemma, norms_up=True),
    "gemma3": Architecture("Gemma3ForCausalLM", more=_gemma3, norms_up=True),
    **{name: Architecture(f"G{name[1:]}ForCausalLM", own, {
        "embedding_length_per_layer_input": "hidden_size_per_layer_input", "attention.shared_kv_layers": "num_kv_shared_layers",
        "altup.active_idx": "altup_active_idx", "altup.num_inputs": "altup_num_inputs"}, more)
        for name, own, more in (("gemma3n", _GEMMAS, _gemma3n), (
            "gemma4", {**_GEMMAS, "post_ffw_norm": "mlp.joint"}, _gemma4))},
    "granite": Architecture("GraniteForCausalLM", keys=_SCALES, permuted=True),
    "granitemoe": Architecture("GraniteMoeForCausalLM", keys=_SCALES, permuted=True),
    "olmo2": Architecture("Olmo2ForCausalLM", more=lambda value: {
        "architectures": ["Olmo3ForCausalLM"]} if value("attention.sliding_window") else {}),
    "phi3": Architecture("Phi3ForCausalLM", _MERGED), "glm4": Architecture("Glm4ForCausalLM", _MERGED),
    "chatglm": Architecture("ChatGLMModel", _MERGED, more=lambda value: {
        "kv_channels": _head_size(value), "multi_query_attention": True, "rope_ratio": (value("rope.freq_base") or 1e4) / 1e4}),
    "glm4moe": Architecture("Glm4MoeForCausalLM", _SECOND), "seed_oss": Architecture("SeedOssForCausalLM", _SECOND),
    "gpt2": Architecture("GPT2LMHeadModel"), "starcoder": Architecture("GPTBigCodeForCausalLM", more=lambda value: {
        "multi_query": value("attention.head_count_kv") == 1}),
    "falcon": Architecture("FalconForCausalLM", more=lambda _: {
        "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}),
    "apertus": Architecture("ApertusForCausalLM", {name: name.replace("xielu", "mlp.act") for name in _XIELU}),
    **{name: Architecture(f"{family}ForCausalLM", _DELTA, norms_up=True, more=_delta) for name, family in {
        "qwen3next": "Qwen3_5Moe", "qwen35": "Qwen3_5", "qwen35moe": "Qwen3_5Moe"}.items()},
    "mpt": Architecture("MptForCausalLM", more=lambda value: {"attn_config": {
        "clip_qkv": value("attention.clamp_kqv") or None, "alibi_bias_max": int(value("attention.max_alibi_bias") or 0)}}),
    "minicpm": Architecture("MiniCPMForCausalLM", more=_minicpm, permuted=True),
    "minicpm3": Architecture("MiniCPM3ForCausalLM", more=lambda value: {
        **_minicpm(value), **_deepseek(value), "v_head_dim": value("embedding_length") // value("attention.head_count")}),
    **{name: Architecture(f"{family}ForCausalLM", {
        "indexer.attn_q_b": "attention.index_q", "indexer.attn_k": "attention.index_k",
        "indexer.k_norm": "attention.index_norm", "indexer.proj": "attention.index_weights"}, {
            "attention.indexer.head_count": "index_n_heads", "attention.indexer.key_length": "index_head_dim",
            "attention.indexer.top_k": "index_topk"}, more=_deepseek) for name, family in {
                "glm-dsa": "GlmMoeDsa", "deepseek32": "DeepseekV32"}.items()},
    "deepseek2": Architecture("DeepseekV3ForCausalLM", more=_deepseek),
    "hy_v3": Architecture("HYV3ForCausalLM", more=lambda value: {
        "num_shared_experts": (value("expert_shared_feed_forward_length") or 0) // value("expert_feed_forward_length")}),
    "mellum": Architecture("MellumForCausalLM", more=lambda value: {"norm_topk_prob": True, "rope_parameters": {
        "full_attention": {"rope_theta": value("rope.freq_base"), **_yarn(value).get("rope_parameters", {})},
        "sliding_attention": {"rope_theta": value("rope.freq_base_swa") or value("rope.freq_base")}}}),
    "cohere2moe": Architecture("Cohere2MoeForCausalLM", keys={
        "expert_feed_forward_length": "intermediate_size", "feed_forward_length": "prefix_dense_intermediate_size"},
        more=lambda value: {"expert_selection_fn": "softmax" if value("expert_gating_func") == 1 else "sigmoid"}),
    "gpt-oss": Architecture("GptOssForCausalLM", _SECOND, more=lambda value: _yarn(value, truncate=False)),
    "mistral3": Architecture("Ministral3ForCausalLM", permuted=True, more=lambda value: _yarn(
        value, llama_4_scaling_beta=value("attention.temperature_scale"))),
    "llama4": Architecture("Llama4ForCausalLM", keys={"expert_feed_forward_length": "intermediate_size"}, more=lambda value: {
        "use_qk_norm": value("expert_count") != 128}),
    "afmoe": Architecture("AfmoeForCausalLM", more=lambda _: {"mup_enabled": True})}

COMMON = {"context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
          "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
          "attention.head_count_kv": "num_key_value_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
          "attention.key_length": "head_dim", "rope.freq_base": "rope_theta"}
_OFTEN = {
    "context_length": "n_positions max_seq_len seq_length", "block_count": "num_layers", "expert_count": "num_experts",
    "feed_forward_length": "n_inner ffn_hidden_size intermediate_size_mlp",
    "attention.head_count_kv": "num_kv_heads multi_query_group_num", "attention.layer_norm_rms_epsilon": "layernorm_epsilon",
    "attention.layer_norm_epsilon": "layer_norm_eps layer_norm_epsilon norm_epsilon norm_eps",
    "expert_used_count": "num_experts_per_tok moe_topk moe_k", "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts num_shared_experts num_shared_expert moe_num_shared_experts",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size shared_intermediate_size",
    "expert_weights_scale": "routed_scaling_factor route_scale router_scaling_factor", "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace num_dense_layers moe_layer_start_index",
    "interleave_moe_layer_step": "interleave_moe_layer_step moe_layer_interval", "attention.kv_lora_rank": "kv_lora_rank",
    "use_parallel_residual": "use_parallel_residual", "attention.clamp_kqv": "clip_qkv", "logit_scale": "logit_scale",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
"""Keys, and the names that configs of one family or another have for them."""
_IGNORED = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight|.*\.attn_rot_embd|.*\.nextn\..*")
"""Tables of rotations, which are read into the config, and what only drafting needs."""


def architecture(metadata: Mapping[str, Any], tensors: Iterable[str]) -> Architecture:
    """Of a model with tensors of these names. ModelError for one that is not known."""
    name = str(metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise ModelError(f"general.architecture is {name!r}, which Penstock does not read from GGUF files; it reads "
                         f"{', '.join(sorted(ARCHITECTURES))}")
    drafting = metadata.get(f"{name}.nextn_predict_layers") or 0
    found = replace(ARCHITECTURES[name], blocks=metadata.get(f"{name}.block_count", 1 << 30) - drafting)
    two = name == "falcon" and any("attn_norm_2" in one for one in tensors)
    return replace(found, own=_TWO_NORMS, more=lambda _: {"new_decoder_architecture": True}) if two else found


def renamed(arch: Architecture, entry: Entry) -> list[tuple[str, Entry]]:
    """A tensor under the name of its parameter: one for each expert of a stack, none for tables of rotations."""
    block = re.match(r"blk\.([0-9]+)\.", entry.name)
    if _IGNORED.fullmatch(entry.name) or (block is not None and int(block[1]) >= arch.blocks):
        return []
    name = arch.place(entry.name)
    if name is None:
        raise ModelError(f"tensor {entry.name} {list(entry.shape)} has no place in {arch.family}")
    if " " in name:
        start, names, end = re.fullmatch(r"(blocks\.[0-9]+\.)(.+)(\.[a-z]+)", name).groups()  # type: ignore[union-attr]
        return [(f"{start}{one}{end}", entry) for one in names.split()]
    if name.endswith(("mlp.correction", ".q_norm.weight", ".k_norm.weight", ".conv.weight")):
        return [(name, replace(entry, shape=(math.prod(entry.shape),)))]
    if name.endswith("experts.gate_up.weight"):
        return [(name, replace(entry, shape=(math.prod(entry.shape[:-1]), entry.shape[-1])))]
    if "@" not in name:
        return [(name, entry)]
    count = entry.shape[0]
    each = (entry.end - entry.start) // count
    return [(name.replace("@", str(i)), Entry(entry.name, entry.shape[1:], entry.kind, entry.start + i * each,
                                              entry.start + (i + 1) * each)) for i in range(count)]


def config_of(files: Sequence[File]) -> dict[str, Any]:
    """config.json, with `quantization_config` for the reader `quant/dialects/gguf.py`. ModelError: what cannot be run."""
    try:
        return _config(files)
    except (TypeError, ArithmeticError) as error:
        raise ModelError(f"{files[0].path}: the metadata lacks a number that {files[0].metadata['general.architecture']} "
                         f"needs, or has something else for it: {error}") from None


def _config(files: Sequence[File]) -> dict[str, Any]:
    metadata = files[0].metadata
    tensors = {name: (file, entry) for file in files for name, entry in file.tensors.items()}
    arch, prefix = architecture(metadata, tensors), metadata["general.architecture"]
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{files[0].path} has no token_embd.weight: it holds no language model (a vocabulary, or an adapter?)")

    tables = {name: _floats(*tensors[f"{name}.weight"]) for name in _TABLES if f"{name}.weight" in tensors}

    def value(key: str) -> Any:
        if key in tables:
            return tables[key]
        found = metadata.get(f"{prefix}.{key}")
        if isinstance(found, list) and found and all(one == found[0] for one in found):
            return found[0]
        return arch.blocks if key == "block_count" and found is not None else found

    vocab, sliding = tensors["token_embd.weight"][1].shape[0], metadata.get(f"{prefix}.attention.sliding_window_pattern")
    config: dict[str, Any] = {"architectures": [arch.family], "vocab_size": vocab, "padded_vocab_size": vocab,
                              "tie_word_embeddings": "output.weight" not in tensors, "dtype": _dtype(
                                  entry for _, entry in tensors.values()),
                              "sliding_window": value("attention.sliding_window") or None}
    for key, names in (*COMMON.items(), *_OFTEN.items(), *arch.keys.items()):
        config |= {name: value(key) for name in names.split() if value(key) is not None}
    if isinstance(sliding, list):
        config["layer_types"] = [f"{'sliding' if one else 'full'}_attention" for one in sliding[:arch.blocks]]
    size, routers = _head_size(value), [name for name in tensors if name.endswith(".ffn_gate_inp.weight")]
    config = {"first_k_dense_replace": min((int(name.split(".")[1]) for name in routers), default=0), "head_dim": size,
              "partial_rotary_factor": (value("rope.dimension_count") or size) / (size or 1), **config}
    config |= _rotation(value)
    config |= {key: tensors[name][1].shape[0] for name, key in _ROWS.items() if name in tensors}
    listed = [pair for _, entry in tensors.values() for pair in renamed(arch, entry)]
    config |= _facts({name for name, _ in listed}) | arch.more(value)
    kinds = {name.removesuffix(".weight"): one.kind for name, one in listed
             if one.kind not in ("f32", "f16", "bf16") or name.endswith((".kv_b.k", ".kv_b.v"))
             or one.name.endswith((".ssm_ba.weight", ".ssm_in.weight"))}
    heads = [config.get("num_attention_heads"), config.get("num_key_value_heads", config.get("num_attention_heads"))]
    config["quantization_config"] = {"quant_method": "gguf", "kinds": kinds, "permuted": heads if arch.permuted else None,
                                     "norms_up": arch.norms_up}
    if "linear_num_key_heads" in config:
        sizes = (f"linear_{one}" for one in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"))
        # Qwen3.5's converter sorts heads of values by their place among those of a key.
        config["quantization_config"]["delta"] = {
            "sizes": [config[one] for one in sizes], "tiled": prefix != "qwen3next",
            "joined": sorted({one.name.split(".")[2] for _, one in listed if re.search(r"\.ssm_(ba|in)\.", one.name)}),
            "blocks": [name.split(".")[1] for name, _ in listed if name.endswith(".attention.decay")]}
    return config | {f"{ours}_token_id": token for role, ours in (("bos", "bos"), ("eos", "eos"), ("padding", "pad"))
                     if (token := metadata.get(f"tokenizer.ggml.{role}_token_id")) is not None}


def _facts(names: set[str]) -> dict[str, bool]:
    """The vectors that there are, under the names that families have for that."""
    ends = {".".join(name.split(".")[-2:]) for name in names}
    bias, inner = bool(ends & {"q.bias", "qkv.bias", "kv_a.bias"}), "down.bias" in ends
    found = dict.fromkeys(("attention_bias", "qkv_bias", "use_qkv_bias", "add_qkv_bias"), bias)
    keys, values = (sum(name.endswith(f".{one}.weight") for name in names) for one in "kv")
    return found | {"attention_k_eq_v": keys > values, "attention_out_bias": "o.bias" in ends, "mlp_bias": inner,
                    "lm_head_bias": "head.bias" in ends, "use_bias": bias or inner,
                    **dict.fromkeys(("use_qk_norm", "qk_layernorm"), "q_norm.weight" in ends)}


def _dtype(entries: Any) -> str:
    """The dtype to compute in: of a plain file its own; bfloat16 beside quantized weights, whose range it surely has."""
    kinds = {entry.kind for entry in entries if len(entry.shape) > 1}
    plain = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
    return plain[next(iter(kinds))] if len(kinds) == 1 and kinds <= plain.keys() else "bfloat16"


def _rotation(value: Values) -> dict[str, Any]:
    """Scalings: as keys, or as a table of divisors for each frequency (Llama 3, LongRoPE)."""
    kind, factor = value("rope.scaling.type"), value("rope.scaling.factor")
    original = value("rope.scaling.original_context_length") or value("context_length")
    if tables := {name: value(name) for name in _TABLES if value(name) is not None}:
        both = "rope_freqs" if "rope_freqs" in tables else ""
        scaling = {"rope_type": "longrope", "original_max_position_embeddings": original, "factor": 1.0,
                   "attention_factor": 1.0 if both else value("rope.scaling.attn_factor") or 1.0,
                   **{f"{name}_factor": tables[both or f"rope_factors_{name}"] for name in ("short", "long")}}
        return {"rope_scaling": scaling, "original_max_position_embeddings": original}
    if kind == "linear" and factor:
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind not in (None, "none", "linear", "yarn", "longrope"):
        raise ModelError(f"rope.scaling.type is {kind!r}; possible are none, linear, yarn and longrope")
    return _yarn(value)


def _floats(file: File, entry: Entry) -> list[float]:
    if entry.kind != "f32":
        raise ModelError(f"{file.path}: tensor {entry.name} is {entry.kind}; possible is f32")
    with file.path.open("rb") as opened:
        opened.seek(entry.start)
        return list(struct.unpack(f"<{(entry.end - entry.start) // 4}f", opened.read(entry.end - entry.start)))
