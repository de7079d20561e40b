"""Writes GGUF files: their bytes, and a Hugging Face folder's config and tokenizer as the metadata that llama.cpp reads.

`gguf.py` and `gguf_text.py` read what is written here; tables of names are theirs."""

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.checkpoint.gguf import ARCHITECTURES, BLOCK, COMMON, ENDS, SIZES, Architecture
from penstock.checkpoint.gguf_text import CONTRACTIONS, SPLITS
from penstock.core.errors import ConfigError

NUMBERS = {kind: number for number, (kind, _, _) in SIZES.items()}
_WRITTEN = ("llama", "qwen2", "qwen3")
"""Architectures that are written: those whose config has no more than the common keys."""
_ALIGN = 32
_FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q4_k": 14, "q6_k": 18, "bf16": 32}
"""`general.file_type` by the type of most matrices."""
_OTHER_SPLITS = {r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "smollm"}
"""Expressions that cut as one of `SPLITS` does, written otherwise."""


def architecture(config: Mapping[str, Any]) -> tuple[str, Architecture]:
    """The architecture that a config's model is written as. ConfigError if there is none."""
    family = (config.get("architectures") or [None])[0]
    family = "LlamaForCausalLM" if family == "MistralForCausalLM" and not config.get("sliding_window") else family
    known = {ARCHITECTURES[name].family: name for name in _WRITTEN}
    if family not in known:
        raise ConfigError(f"{family} is not written as GGUF; possible are {', '.join(known)}. Write a folder instead (a name "
                          "without .gguf)")
    return known[family], ARCHITECTURES[known[family]]


def name_of(arch: Architecture, name: str, parameter: str) -> str:
    """The name in the file of a tensor, given its parameter's. ConfigError for one that the architecture does not have."""
    layer = next((part for part in parameter.split(".") if part.isdigit()), "")
    for theirs in (*ENDS, *(f"blk.{layer}.{theirs}" for theirs in BLOCK)):
        found = f"{theirs}.{name.rpartition('.')[2]}"
        if arch.place(found) == parameter:
            return found
    raise ConfigError(f"tensor {name} has no name in GGUF's architecture")


def metadata_of(folder: Path, config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """All that a file says besides tensors, of a whole config; `kind`: of most matrices. ConfigError: what has no form."""
    prefix, _ = architecture(config)
    how, size, _, rotation = _rotation(config)
    if how not in ("default", "linear", "llama3"):
        raise ConfigError(f"rotary embeddings of type {how!r} are not written as GGUF; possible are default, linear and llama3")
    found: dict[str, Any] = {"general.architecture": prefix, "general.name": folder.name, "general.alignment": _ALIGN,
                             "general.quantization_version": 2, "general.file_type": _FILE_TYPES.get(kind, 0)}
    found |= {**{f"{prefix}.{key}": config[ours] for key, ours in COMMON.items()}, f"{prefix}.attention.value_length": size,
              f"{prefix}.rope.dimension_count": size, f"{prefix}.vocab_size": config["vocab_size"]}
    if how == "linear":
        found |= {f"{prefix}.rope.scaling.type": "linear", f"{prefix}.rope.scaling.factor": float(rotation["factor"])}
    return found | _tokenizer(folder, config)


def _rotation(config: Mapping[str, Any]) -> tuple[str, int, float, Mapping[str, Any]]:
    """Rotary embeddings of a config: the kind of scaling, the size of heads, theta, and all that is said of the scaling."""
    said = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return said.get("rope_type") or said.get("type") or "default", config["head_dim"], config["rope_theta"], said


def divisors(config: Mapping[str, Any]) -> list[float] | None:
    """The table rope_freqs of Llama 3's scaling (Meta's formula: long waves are stretched by the factor, short ones stay)."""
    how, size, theta, said = _rotation(config)
    if how != "llama3":
        return None
    factor, original = float(said["factor"]), said["original_max_position_embeddings"]
    low, high = said["low_freq_factor"], said["high_freq_factor"]
    waves = (original / (2 * math.pi * theta ** (2 * i / size)) for i in range(size // 2))
    smooth = (min(1.0, max(0.0, (one - low) / (high - low))) for one in waves)
    return [1 / ((1 - one) / factor + one) for one in smooth]


def _tokenizer(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no tokenizer.json, from which a GGUF file's tokenizer is written")
    given = json.loads(path.read_text("utf-8"))
    model, added = given["model"], given.get("added_tokens") or []
    if model.get("type") != "BPE":
        raise ConfigError(f"tokenizers of type {model.get('type')!r} are not written as GGUF; possible is BPE")
    names = {token: name for name, token in model["vocab"].items()}
    spaced = '"\\u2581"' in json.dumps(given.get("normalizer")) or '"\\u2581"' in json.dumps(given.get("pre_tokenizer"))
    kinds = {token: 6 if spaced and len(name) == 6 and name.startswith("<0x") else 1 for token, name in names.items()}
    for entry in added:
        names[entry["id"]], kinds[entry["id"]] = entry["content"], 3 if entry["special"] else 4
    count = max(config["vocab_size"], max(names) + 1)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    found: dict[str, Any] = {"tokenizer.ggml.tokens": [names.get(i, f"[PAD{i}]") for i in range(count)],
                             "tokenizer.ggml.token_type": [kinds.get(i, 5) for i in range(count)]}
    if spaced:
        ranks = {merge.replace(" ", ""): rank for rank, merge in reversed([*enumerate(merges)])}  # a token's first merge
        unknown = model["vocab"].get(model.get("unk_token") or "<unk>", 0)
        found["tokenizer.ggml.token_type"][unknown] = 2
        found |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.unknown_token_id": unknown, "tokenizer.ggml.pre": "default",
                  "tokenizer.ggml.scores": [float(-ranks.get(name, len(merges))) for name in found["tokenizer.ggml.tokens"]]}
    else:
        found |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": _pre(given), "tokenizer.ggml.merges": merges}
    return found | _roles(folder, config, names, json.dumps(given.get("post_processor")))


def _pre(given: Mapping[str, Any]) -> str:
    """The name of a byte-level tokenizer's expressions. ConfigError if llama.cpp has none for them."""
    said = given.get("pre_tokenizer") or {}
    parts = said.get("pretokenizers") or [said]
    splits = [part["pattern"].get("Regex", "").replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)", CONTRACTIONS) for part in parts
              if part.get("type") == "Split"]
    if not splits and any(part.get("type") == "ByteLevel" and part.get("use_regex", True) for part in parts):
        return "gpt-2"
    whole = bool(given["model"].get("ignore_merges"))
    for name, known in (("llama-bpe", SPLITS["llama-bpe"]),) if whole else SPLITS.items():
        if tuple(splits) == known:
            return name
    if len(splits) == 1 and splits[0] in _OTHER_SPLITS:
        return _OTHER_SPLITS[splits[0]]
    raise ConfigError(f"the tokenizer cuts texts by {splits}, for which llama.cpp has no name; possible are those of "
                      f"{', '.join(SPLITS)}")


def _roles(folder: Path, config: Mapping[str, Any], names: Mapping[int, str], processor: str) -> dict[str, Any]:
    path, found = folder / "tokenizer_config.json", dict[str, Any]()
    said = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    ids = {name: token for token, name in names.items()}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        name = said.get(f"{key}_token")
        name = name.get("content") if isinstance(name, dict) else name
        token = ids.get(name) if name else config.get(f"{key}_token_id")
        token = token[0] if isinstance(token, list) else token
        if isinstance(token, int):
            found[f"tokenizer.ggml.{role}_token_id"] = token
            if role == "bos":
                prepended = said.get("add_bos_token")
                prepended = json.dumps(names[token]) in processor if prepended is None else bool(prepended)
                found["tokenizer.ggml.add_bos_token"] = prepended
    if "tokenizer.ggml.bos_token_id" not in found:
        found["tokenizer.ggml.add_bos_token"] = False
    template = folder / "chat_template.jinja"
    text = template.read_text("utf-8") if template.is_file() else said.get("chat_template")
    return {**found, "tokenizer.chat_template": text} if isinstance(text, str) else found


def write(path: Path, metadata: Mapping[str, Any], tensors: Sequence[tuple[str, tuple[int, ...], str]],
          data: Iterable[bytes | memoryview], progress: Callable[[int, int], None]) -> int:
    """One file: tensors are (name, shape with rows first, type), `data` their bytes in the same order. Returns its size.
    `progress` is told bytes of tensors: those written, and all."""
    head = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for name, value in metadata.items():
        head += _text(name) + _value(value)
    at, sizes = 0, list[int]()
    for name, shape, kind in tensors:
        _, columns, nbytes = SIZES[NUMBERS[kind]]
        size = math.prod(shape) // columns * nbytes
        head += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), NUMBERS[kind], at)
        sizes.append(size)
        at += -(-size // _ALIGN) * _ALIGN
    with path.open("xb") as file:
        file.write(head + b"\0" * (-len(head) % _ALIGN))
        start = file.tell()
        for size, block in zip(sizes, data, strict=True):
            assert len(block) == size, (len(block), size)
            file.write(block)
            file.write(b"\0" * (-size % _ALIGN))
            progress(file.tell() - start, at)
        return file.tell()


def _text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """A value behind its type."""
    if isinstance(value, list):
        if isinstance(value[0], str) if value else True:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
        form, kind = ("f", 6) if isinstance(value[0], float) else ("i", 5)
        return struct.pack(f"<IIQ{len(value)}{form}", 9, kind, len(value), *value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    form, kind = ("?", 7) if isinstance(value, bool) else ("f", 6) if isinstance(value, float) else ("I", 4)
    return struct.pack(f"<I{form}", kind, value)
