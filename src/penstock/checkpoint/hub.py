"""Resolves a model's name to a folder on this machine: a local folder, the packaged model, or a hub id, which is downloaded."""

import hashlib
import json
import os
import re
import shutil
import tempfile
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from penstock import canary
from penstock.checkpoint import gguf
from penstock.checkpoint.gguf_text import files_of
from penstock.core.errors import ModelError, first_line
from penstock.core.files import read_json


def aliases_file() -> Path:
    """PENSTOCK_ALIASES, or aliases.json in the user's configuration folder."""
    folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(os.environ.get("PENSTOCK_ALIASES") or f"{folder}/penstock/aliases.json").expanduser()


def read_aliases() -> dict[str, str]:
    """All aliases, short names of folders or hub ids; none if there is no file. ModelError if it is not what it should be."""
    found = read_json(aliases_file(), optional=True)
    if not all(isinstance(value, str) for value in found.values()):
        raise ModelError(f"{aliases_file()} must be a JSON object of texts: {{\"name\": \"folder or hub id\"}}")
    return found


def write_aliases(aliases: dict[str, str]) -> None:
    """Replaces the file, whole or not at all."""
    file = aliases_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(json.dumps(aliases, indent=2) + "\n")
    new.replace(file)


_WRITTEN = "2"
"""Changes when the written files do."""


def folder_of(path: Path) -> Path:
    """A GGUF file, or one of a split model, as a model's folder: the small files of a Hugging Face folder, written once into a
    cache, beside links. ModelError: what cannot be read or written."""
    paths = [one.absolute() for one in gguf.siblings(path)]
    facts = [(str(one), one.stat().st_size, one.stat().st_mtime_ns) for one in paths]
    home = Path(os.environ.get("PENSTOCK_CACHE") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/penstock").expanduser()
    digest = hashlib.sha256(json.dumps([_WRITTEN, facts]).encode()).hexdigest()[:16]
    target = home / "gguf" / f"{path.stem[:80]}-{digest}"
    if (target / "config.json").is_file():
        return target
    files = [gguf.read(one) for one in paths]
    contents = {"config.json": json.dumps(gguf.config_of(files)).encode()}
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


FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.tiktoken"]
"""The files of a hub repository that Penstock reads."""

SKIPPED = ["original/*", "consolidated*", "onnx/*", "*/*.safetensors"]
"""Other copies of the weights, in formats that Penstock does not read."""

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")


def resolve_folder(model: str, revision: str | None = None, *, resume: bool = False) -> Path:
    """The folder of `model`, a path or a hub id at `revision`. A path that exists never opens a socket. "canary" is the
    packaged model, whatever the folder here holds; a .gguf file becomes a folder; hf:OWNER/REPOSITORY:FILE.gguf is one there.

    With `resume` a download goes on inside a file. Honours HF_HUB_OFFLINE, HF_HOME, HF_TOKEN. ModelError says what to do."""
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
        if files and len(gguf.siblings(files[0])) < len(files):
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
            _fetch(model, revision, files or FILES, None if files else SKIPPED)
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


_CHUNK = 1 << 20


def _fetch(repository: str, revision: str | None, patterns: list[str], ignored: list[str] | None) -> None:
    """Completes the blobs of the files that match, each from where it stopped: huggingface_hub begins a file again after a
    break, which costs hours for large ones. It links the finished ones. OSError, or the hub's own errors, if it cannot."""
    from huggingface_hub import HfApi, constants, hf_hub_url
    from huggingface_hub.file_download import get_hf_file_metadata, repo_folder_name
    from huggingface_hub.utils._paths import filter_repo_objects

    info = HfApi().model_info(repository, revision=revision)
    names = [one.rfilename for one in info.siblings or []]
    blobs = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model") / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    for name in filter_repo_objects(names, allow_patterns=patterns, ignore_patterns=ignored):
        url = hf_hub_url(repository, name, revision=info.sha)
        found = get_hf_file_metadata(url)
        if found.etag is None or found.size is None or (blobs / found.etag).exists():
            continue
        _go_on(name, found.location, blobs / found.etag, found.size, urlsplit(found.location).netloc == urlsplit(url).netloc)


def _go_on(name: str, url: str, blob: Path, size: int, own: bool) -> None:
    """One file, by way of BLOB.part. `own`: it lies on the hub itself, which may see the user's token."""
    from huggingface_hub.utils._headers import build_hf_headers
    from tqdm import tqdm

    part = blob.with_name(blob.name + ".part")
    start = part.stat().st_size if part.exists() else 0
    headers = {**(build_hf_headers() if own else {}), **({"Range": f"bytes={start}-"} if start else {})}
    if start < size:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
            going_on = answer.status == 206
            with part.open("ab" if going_on else "wb") as file, tqdm(
                    desc=name, total=size, initial=start if going_on else 0, unit="B", unit_scale=True) as bar:
                while data := answer.read(_CHUNK):
                    file.write(data)
                    bar.update(len(data))
    with part.open("rb") as file:
        wrong = len(blob.name) == 64 and hashlib.file_digest(file, "sha256").hexdigest() != blob.name
    if part.stat().st_size == size and not wrong:
        part.replace(blob)
        return
    if wrong or part.stat().st_size > size:
        part.unlink()
        raise ModelError(f"{name} arrived damaged and was deleted; pull again")
    raise ModelError(f"the connection ended in the middle of {name}; pull again to go on")
