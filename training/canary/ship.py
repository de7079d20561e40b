"""Puts collected archives into place: canary into the package, all else into `tests/assets`, logs beside the recipe.

    python -m training.canary.ship OUT/*.tar.gz --round second
"""

from __future__ import annotations

import argparse
import shutil
import tarfile
import tempfile
from pathlib import Path

from penstock.canary import MODEL

HERE = Path(__file__).parent
ASSETS = HERE.parents[1] / "tests" / "assets"


def place(name: str) -> Path:
    """The folder of a member, head or adapter in this repository."""
    return MODEL if name == "canary" else ASSETS / name


def ship(archive: Path, logs: Path) -> str:
    """Unpacks one archive, its log into the folder `logs`; what was done."""
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(archive) as tar:
        tar.extractall(scratch, filter="data")
        member = next(Path(scratch).iterdir())
        logs.mkdir(parents=True, exist_ok=True)
        if (member / "log.jsonl").exists():
            shutil.copy(member / "log.jsonl", logs / f"{member.name}.jsonl")
        if not (member / "model").exists():
            return f"{member.name}: no model in {archive}"
        folder = place(member.name)
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(member / "model", folder)
        for path in folder.iterdir():
            path.chmod(0o644)
        return f"{member.name}: {folder}"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archives", nargs="+", type=Path)
    parser.add_argument("--round", choices=("first", "second"), default="first", help="whose logs these are")
    args = parser.parse_args()
    for archive in args.archives:
        print(ship(archive, HERE / "logs" / args.round))  # noqa: T201


if __name__ == "__main__":
    main()
