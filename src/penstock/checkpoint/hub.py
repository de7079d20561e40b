"""Resolves a model's name to a folder on this machine: a local folder, the packaged model, or a hub id, which is downloaded."""

from __future__ import annotations

import re
from pathlib import Path

from penstock import canary
from penstock.core.errors import ModelError

FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.tiktoken"]
"""The files of a hub repository that Penstock reads."""

SKIPPED = ["original/*", "consolidated*", "onnx/*", "*/*.safetensors"]
"""Other copies of the weights, in formats that Penstock does not read."""

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")


def resolve_folder(model: str, revision: str | None = None) -> Path:
    """The folder of `model`, a path or a hub id at `revision`. A path that exists never opens a socket. "canary" is the
    packaged model, whatever the current folder holds.

    Honours huggingface_hub's HF_HUB_OFFLINE, HF_HOME and HF_TOKEN. ModelError says where was looked and what to do.
    """
    if model == canary.NAME:
        return canary.model_folder()
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(f"{model} is a file; Penstock needs the model's folder, with config.json and *.safetensors in it")
    if not _HUB_ID.fullmatch(model):
        raise ModelError(f"there is no folder {path.absolute()}. Give a model's folder (with config.json and *.safetensors) "
                         "or a hub id such as Qwen/Qwen3-0.6B")
    return _download(model, revision)


def _download(model: str, revision: str | None) -> Path:
    # Late: a local folder must not pay for importing an HTTP client.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    named = model + (f" at revision {revision}" if revision else "")
    here, cache = f"there is no folder {Path(model).absolute()}", f"the hub cache ({constants.HF_HUB_CACHE})"
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=FILES, ignore_patterns=SKIPPED))
    except HFValidationError as error:
        raise ModelError(f"{here}, and {model!r} is not a hub id: {error}") from None
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            raise ModelError(f"{here}, and HF_HUB_OFFLINE is set while {named} is not in {cache}. Unset it, or download on a "
                             f"machine with a network (hf download {model}) and copy the folder") from None
        raise ModelError(f"{here}, and {named} is neither in {cache} nor could it be downloaded: {_first_line(error)}. Check "
                         "the network, or give the path of a local folder") from None
    except HfHubHTTPError as error:
        raise ModelError(f"{here}, and the hub does not give {named}: {_first_line(error)}. Check its spelling; a gated or "
                         "private model needs its terms accepted and HF_TOKEN set") from None
    except OSError as error:
        raise ModelError(f"{here}, and downloading {named} failed: {_first_line(error)}. Check the network and disk") from None


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
