"""Downloads a hub repository's files into the hub's own cache, going on in the middle of a file where a download stopped.

huggingface_hub begins a file again after a break; that costs hours for large ones. It links the finished ones."""

import hashlib
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from penstock.core.errors import ModelError

_CHUNK = 1 << 20


def fetch(repository: str, revision: str | None, patterns: list[str], ignored: list[str] | None) -> None:
    """Completes the blobs of the files that match. OSError, or the hub's own errors, if it cannot; what has arrived stays."""
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
        _download(name, found.location, blobs / found.etag, found.size, urlsplit(found.location).netloc == urlsplit(url).netloc)


def _download(name: str, url: str, blob: Path, size: int, own: bool) -> None:
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
