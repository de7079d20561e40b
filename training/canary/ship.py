"""Puts collected archives into place: canary into the package, all else into `tests/assets`, logs beside the recipe.

    python -m training.canary.ship OUT          # OUT/ROUND/NAME.tar.gz, as `run --collect OUT` packs them

What was trained in both rounds is left as the second made it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tarfile
import tempfile
from pathlib import Path

from training.canary.documents import MIXTURES

from penstock.canary import MODEL

HERE = Path(__file__).parent
ASSETS = HERE.parents[1] / "tests" / "assets"


def place(name: str) -> Path:
    """The folder of a member, head or adapter in this repository."""
    return MODEL if name == "canary" else ASSETS / name


def ship(archive: Path, logs: Path) -> str:
    """Unpacks one archive, its log into the folder `logs`; what was done."""
    name = archive.name.removesuffix(".tar.gz")
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(archive) as tar:
        tar.extractall(scratch, filter="data")
        member, folder = Path(scratch) / name, place(name)
        logs.mkdir(parents=True, exist_ok=True)
        if (member / "log.jsonl").exists():
            shutil.copy(member / "log.jsonl", logs / f"{name}.jsonl")
        if not (member / "model").exists():
            return f"{name}: no model in {archive}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(member / "model", folder)
        for path in folder.iterdir():
            path.chmod(0o644)
            original = MODEL / path.name
            if folder != MODEL and original.exists() and path.read_bytes() == original.read_bytes():
                # The tokenizer and its like are canary's; one copy is enough.
                path.unlink()
                path.symlink_to(os.path.relpath(original, folder))
        return f"{name}: {folder}"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    for round_ in MIXTURES:
        for archive in sorted((args.out / round_).glob("*.tar.gz")):
            print(ship(archive, HERE / "logs" / round_))  # noqa: T201


if __name__ == "__main__":
    main()
