"""The JSON files of a model's folder."""

import json
from pathlib import Path
from typing import Any

from penstock.core.errors import ModelError


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The object in a file; an empty one if there is no such file and it is `optional`. ModelError: what is wrong with it."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        if optional:
            return {}
        raise ModelError(f"{path} is missing; is the folder whole?") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}; mend it, or download it again") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path} must be a JSON object, but is a {type(found).__name__}; mend it, or download it again")
    return found
