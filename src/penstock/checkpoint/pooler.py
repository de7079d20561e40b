"""Turns hidden states into one vector: by the modules of a sentence-transformers folder, or by the default of decoders."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.checkpoint.config import read_json
from penstock.core.errors import ModelError

_MODES = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
"""The poolings of sentence-transformers that exist here, by their keys in 1_Pooling/config.json."""


class Pooler(msgspec.Struct, array_like=True, frozen=True):
    """A folder's own pooling."""

    kind: str = "last"
    """last | mean | cls"""
    normalize: bool = True
    """Whether vectors are scaled to length 1."""
    refused: str = ""
    """Why texts cannot be embedded as the folder says; empty if they can."""
    stated: bool = True
    """The folder or the options say so; else it is the default of decoders."""


def read_pooler(folder: Path) -> Pooler:
    """The pooling of a model folder. Without modules.json: the last token's state, normalised; of an encoder the mean."""
    path = Path(folder) / "modules.json"
    if not path.exists():
        return Pooler(stated=False)
    try:
        modules = msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path} cannot be read: {error}; download it again") from None
    kind, normalize = "last", False
    for module in modules:
        name = str(module.get("type", "")).rpartition(".")[2]
        if name == "Pooling":
            kind = _mode(read_json(Path(folder) / str(module.get("path", "1_Pooling")) / "config.json"), path)
        elif name == "Normalize":
            normalize = True
        elif name != "Transformer":
            return Pooler(kind, normalize, f"modules.json has a module of the type {name or 'nothing'}; possible are "
                                           "Transformer, Pooling and Normalize")
    return Pooler(kind, normalize)


def _mode(config: Mapping[str, Any], path: Path) -> str:
    # Newer folders name the mode, older ones have a flag for each.
    named = str(config.get("pooling_mode") or "")
    found = [named] if named else [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    modes = {**_MODES, **{mode: mode for mode in _MODES.values()}, "lasttoken": "last"}
    if len(found) != 1 or found[0] not in modes:
        raise ModelError(f"{path}: the pooling is {' and '.join(found) or 'not stated'}; possible is one of "
                         f"{', '.join(_MODES)}")
    return modes[found[0]]
