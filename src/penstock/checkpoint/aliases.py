"""Short names for models, in a small file of the user's: a JSON object of name and folder or hub id."""

import json
import os
from pathlib import Path

from penstock.core.errors import ModelError


def aliases_file() -> Path:
    """PENSTOCK_ALIASES, or aliases.json in the user's configuration folder."""
    folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(os.environ.get("PENSTOCK_ALIASES") or f"{folder}/penstock/aliases.json").expanduser()


def read_aliases() -> dict[str, str]:
    """All aliases; none if there is no file. ModelError if it is not what it should be."""
    try:
        found = json.loads(aliases_file().read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{aliases_file()} cannot be read as JSON: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ModelError(f"{aliases_file()} must be a JSON object of texts: {{\"name\": \"folder or hub id\"}}")
    return found


def write_aliases(aliases: dict[str, str]) -> None:
    """Replaces the file, whole or not at all."""
    file = aliases_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(json.dumps(aliases, indent=2) + "\n")
    new.replace(file)
