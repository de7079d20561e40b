"""config.json of a model folder: the file, and the text part of a nested one. `models/config.py` interprets its values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.core.errors import ModelError

_OUTER = ("architectures", "tie_word_embeddings", "dtype", "torch_dtype", "eos_token_id", "bos_token_id", "pad_token_id",
          "quantization_config")
"""Keys that a nested config may have outside its text part."""


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
    """config.json of a model folder. Of a nested config (text beside vision) the text part, with the outer architecture."""
    config = read_json(Path(folder) / "config.json")
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    outer = {name: config[name] for name in _OUTER if config.get(name) is not None}
    return {**outer, **{name: value for name, value in text.items() if value is not None or name not in outer}, **{
        name: outer[name] for name in ("architectures",) if name in outer}}
