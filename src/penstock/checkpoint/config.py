"""config.json of a model folder: the file, and the text part of a nested one. `models/config.py` interprets its values."""

import json
from pathlib import Path
from typing import Any

from penstock.core.errors import ModelError

_OUTER = ("architectures", "tie_word_embeddings", "dtype", "torch_dtype", "eos_token_id", "bos_token_id", "pad_token_id",
          "quantization_config", "compression_config")
"""Keys that a nested config may have outside its text part."""
_BESIDE = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files in which programs wrote the `quantization_config` that config.json lacks, and their quant_method."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ModelError if it is missing, unreadable or not an object."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; every model folder has one; is this one whole?") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}; download it again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, not an object; download it again")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder. Of a nested config (text beside vision) the text part, with the outer architecture.
    `quantization_config` is there wherever the folder has it."""
    config = _with_quantization(Path(folder), read_json(Path(folder) / "config.json"))
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    outer = {name: config[name] for name in _OUTER if config.get(name) is not None}
    return {**outer, **{name: value for name, value in text.items() if value is not None or name not in outer}, **{
        name: outer[name] for name in ("architectures",) if name in outer}}


def _with_quantization(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    if config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config"):
        return config
    given = config.get("compression_config")
    for name, method in _BESIDE.items():
        if not given and (folder / name).is_file():
            given = {"quant_method": method, **read_json(folder / name)}
    return {**config, "quantization_config": given} if given else config
