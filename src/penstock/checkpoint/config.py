"""The small JSON files of a model folder: config.json, with the text part of a nested one (`models/config.py` interprets its
values), generation_config.json, and how a sentence-transformers folder pools."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.core.errors import ModelError
from penstock.core.files import read_json

_OUTER = ("architectures", "tie_word_embeddings", "dtype", "torch_dtype", "eos_token_id", "bos_token_id", "pad_token_id",
          "quantization_config", "compression_config")
"""Keys that a nested config may have outside its text part."""
_BESIDE = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files in which programs wrote the `quantization_config` that config.json lacks, and their quant_method."""


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder, of a nested one the text part with the outer architecture; with any `quantization_config`."""
    config = _with_quantization(Path(folder), read_json(Path(folder) / "config.json"))
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    outer = {name: config[name] for name in _OUTER if config.get(name) is not None}
    return {**outer, **{name: value for name, value in text.items() if value is not None or name not in outer}, **{
        name: outer[name] for name in ("architectures",) if name in outer}}


def _with_quantization(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    inner = config["text_config"].get("quantization_config") if isinstance(config.get("text_config"), dict) else None
    given = config.get("quantization_config") or inner or config.get("compression_config")
    for name, method in _BESIDE.items():
        if not given and (folder / name).is_file():
            given = {"quant_method": method, **read_json(folder / name)}
    if given and not isinstance(given, dict):
        raise ModelError(f"{folder}: quantization_config is {given!r}; possible is an object with a quant_method")
    return config if inner or not given else {**config, "quantization_config": given}


def read_generation_config(folder: Path) -> dict[str, Any]:
    """The file's values, or nothing if the model has none. ModelError if it is corrupt."""
    return read_json(Path(folder) / "generation_config.json", optional=True)


def eos_ids(folder: Path, config: Mapping[str, Any]) -> list[int]:
    """The tokens that end a sequence: generation_config.json's, then config.json's, each once."""
    found: list[int | None] = []
    for values in (read_generation_config(folder), config):
        given = values.get("eos_token_id")
        for token in given if isinstance(given, list) else [given]:
            if token is not None and (isinstance(token, bool) or not isinstance(token, int)):
                raise ModelError(f"eos_token_id of {folder} is {given!r}; possible is a token id or a list of them")
            found.append(token)
    return list(dict.fromkeys(token for token in found if token is not None))


_MODES = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
"""The poolings of sentence-transformers that exist here, by their keys in 1_Pooling/config.json."""


class Pooler(msgspec.Struct, array_like=True, frozen=True):
    kind: str = "last"
    """last | mean | cls"""
    normalize: bool = True
    """Whether vectors are scaled to length 1."""
    refused: str = ""
    """Why texts cannot be embedded as the folder says; empty if they can."""
    stated: bool = True
    """The folder or the options say so; else it is the default of decoders."""
    most: int = 0
    """The most tokens of a text that the folder wants (`max_seq_length`); 0: it does not say."""


def read_pooler(folder: Path) -> Pooler:
    """The pooling of a model folder. Without modules.json: the last token's state, normalised; of an encoder the mean."""
    path = Path(folder) / "modules.json"
    if not path.exists():
        return Pooler(stated=False)
    try:
        modules = msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path} cannot be read: {error}; download it again") from None
    kind, normalize, most = "last", False, 0
    for module in modules:
        name = str(module.get("type", "")).rpartition(".")[2]
        if name == "Pooling":
            kind = _mode(read_json(Path(folder) / str(module.get("path", "1_Pooling")) / "config.json"), path)
        elif name == "Transformer":
            most = _most(Path(folder) / str(module.get("path", "")))
        elif name == "Normalize":
            normalize = True
        else:
            return Pooler(kind, normalize, f"modules.json has a module of the type {name or 'nothing'}; possible are "
                                           "Transformer, Pooling and Normalize")
    return Pooler(kind, normalize, most=most)


def _most(folder: Path) -> int:
    """The most tokens of a text, by a file whose name has the encoder's kind (sentence_bert_config.json); 0 if none says."""
    for path in sorted(folder.glob("sentence_*_config.json")):
        found = read_json(path).get("max_seq_length")
        if found is not None and (isinstance(found, bool) or not isinstance(found, int) or found < 1):
            raise ModelError(f"{path}: max_seq_length is {found!r}; possible is a number of tokens")
        return int(found or 0)
    return 0


def _mode(config: Mapping[str, Any], path: Path) -> str:
    # Newer folders name the mode, older ones have a flag for each.
    named = str(config.get("pooling_mode") or "")
    found = [named] if named else [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    modes = {**_MODES, **{mode: mode for mode in _MODES.values()}, "lasttoken": "last"}
    if len(found) != 1 or found[0] not in modes:
        raise ModelError(f"{path}: the pooling is {' and '.join(found) or 'not stated'}; possible is one of "
                         f"{', '.join(_MODES)}")
    return modes[found[0]]
