"""generation_config.json: a model's own sampling defaults and end-of-sequence tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.checkpoint.config import read_json
from penstock.core.errors import ModelError


def read_generation_config(folder: Path) -> dict[str, Any]:
    """The file's values, or nothing if the model has none. ModelError if it is corrupt."""
    path = Path(folder) / "generation_config.json"
    return read_json(path) if path.exists() else {}


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
