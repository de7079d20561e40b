"""Resolves a model's name to a folder on this machine: a local folder, the packaged model, or a hub id, which is downloaded."""

import re
from pathlib import Path

from penstock import canary
from penstock.checkpoint.aliases import read_aliases
from penstock.checkpoint.fetch import fetch
from penstock.checkpoint.gguf import siblings
from penstock.checkpoint.gguf_folder import folder_of
from penstock.core.errors import ModelError, first_line

FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.tiktoken"]
"""The files of a hub repository that Penstock reads."""

SKIPPED = ["original/*", "consolidated*", "onnx/*", "*/*.safetensors"]
"""Other copies of the weights, in formats that Penstock does not read."""

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")


def resolve_folder(model: str, revision: str | None = None, *, resume: bool = False) -> Path:
    """The folder of `model`, a path or a hub id at `revision`. A path that exists never opens a socket. "canary" is the
    packaged model, whatever the folder here holds; a .gguf file becomes a folder; hf:OWNER/REPOSITORY:FILE.gguf is one there.

    With `resume` a download goes on in the middle of a file. Honours huggingface_hub's HF_HUB_OFFLINE, HF_HOME and HF_TOKEN.
    ModelError says where was looked and what to do."""
    if "/" not in model:
        model = read_aliases().get(model, model)
    if model == canary.NAME:
        return canary.model_folder()
    if model.startswith("hf:"):
        return _file_of_repository(model, revision, resume)
    path = Path(model).expanduser()
    try:
        found = path.is_dir()
    except OSError as error:
        raise ModelError(f"there can be no folder {model[:100]!r}: {error.strerror}") from None
    if found:
        files = sorted(path.glob("*.gguf")) if not (path / "config.json").exists() else []
        if files and len(siblings(files[0])) < len(files):
            raise ModelError(f"{path} has {len(files)} GGUF files; name one of them: "
                             f"{', '.join(one.name for one in files[:6])}")
        return folder_of(files[0]) if files else path
    if path.suffix == ".gguf" and path.is_file():
        return folder_of(path)
    if path.exists():
        raise ModelError(f"{model} is a file; Penstock needs a .gguf file, or the model's folder, with config.json and "
                         "*.safetensors in it")
    if not _HUB_ID.fullmatch(model):
        raise ModelError(f"there is no folder {path.absolute()}. Give a model's folder (with config.json and *.safetensors) "
                         "or a hub id such as Qwen/Qwen3-0.6B")
    return _download(model, revision, resume=resume)


def _file_of_repository(model: str, revision: str | None, resume: bool) -> Path:
    """Of hf:OWNER/REPOSITORY:FILE.gguf, all parts if it is split."""
    _, _, rest = model.partition(":")
    repository, _, file = rest.partition(":")
    if not _HUB_ID.fullmatch(repository) or not file.endswith(".gguf"):
        raise ModelError(f"{model!r} is not of the form hf:OWNER/REPOSITORY:FILE.gguf")
    pattern = re.sub(r"-[0-9]{5}-of-([0-9]{5})\.gguf$", r"-*-of-\1.gguf", file)
    path = _download(repository, revision, [pattern], resume) / file
    if not path.is_file():
        raise ModelError(f"the hub's repository {repository} has no file {file}; look at its list of files")
    return folder_of(path)


def _download(model: str, revision: str | None, files: list[str] | None = None, resume: bool = False) -> Path:
    # Late: a local folder must not pay for importing an HTTP client.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    named = model + (f" at revision {revision}" if revision else "")
    here, cache = f"there is no folder {Path(model).absolute()}", f"the hub cache ({constants.HF_HUB_CACHE})"
    try:
        if resume and not constants.HF_HUB_OFFLINE:
            fetch(model, revision, files or FILES, None if files else SKIPPED)
        return Path(snapshot_download(model, revision=revision, allow_patterns=files or FILES,
                                      ignore_patterns=None if files else SKIPPED))
    except HFValidationError as error:
        raise ModelError(f"{here}, and {model!r} is not a hub id: {error}") from None
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            raise ModelError(f"{here}, and HF_HUB_OFFLINE is set while {named} is not in {cache}. Unset it, or download on a "
                             f"machine with a network (hf download {model}) and copy the folder") from None
        raise ModelError(f"{here}, and {named} is neither in {cache} nor could it be downloaded: {first_line(error)}. Check "
                         "the network, or give the path of a local folder") from None
    except HfHubHTTPError as error:
        raise ModelError(f"{here}, and the hub does not give {named}: {first_line(error)}. Check its spelling; a gated or "
                         "private model needs its terms accepted and HF_TOKEN set") from None
    except OSError as error:
        raise ModelError(f"{here}, and downloading {named} failed: {first_line(error)}. Check the network and disk") from None
