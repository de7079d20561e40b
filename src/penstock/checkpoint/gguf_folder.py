"""A GGUF file as a model's folder: the small files that a Hugging Face folder has, written once into a cache, beside links to
the file itself. Everything that reads folders reads it then."""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from penstock.checkpoint import gguf
from penstock.checkpoint.gguf_model import config_of
from penstock.checkpoint.gguf_text import files_of
from penstock.core.errors import ModelError

_VERSION = "1"
"""Changes when the written files do."""


def folder_of(path: Path) -> Path:
    """The folder for a file, or for one file of a split model. ModelError: what cannot be read or written."""
    paths = [one.absolute() for one in gguf.siblings(path)]
    facts = [(str(one), one.stat().st_size, one.stat().st_mtime_ns) for one in paths]
    home = Path(os.environ.get("PENSTOCK_CACHE") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/penstock").expanduser()
    digest = hashlib.sha256(json.dumps([_VERSION, facts]).encode()).hexdigest()[:16]
    target = home / "gguf" / f"{path.stem[:80]}-{digest}"
    if (target / "config.json").is_file():
        return target
    files = [gguf.read(one) for one in paths]
    contents = {"config.json": json.dumps(config_of(files)).encode()}
    if "tokenizer.ggml.tokens" in files[0].metadata:
        contents |= files_of(files[0].metadata)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
        for name, content in contents.items():
            (made / name).write_bytes(content)
        for one in paths:
            (made / one.name).symlink_to(one)
        try:
            made.rename(target)
        except OSError:
            # Another process was first.
            shutil.rmtree(made)
            if not (target / "config.json").is_file():
                raise
    except OSError as error:
        raise ModelError(f"{path} needs a folder for its tokenizer's files, and {target} cannot be written: {error}. Set "
                         "PENSTOCK_CACHE to a folder that can") from None
    return target
