"""Puts collected archives into place: canary into the package, the other members into `tests/assets`, logs beside the recipe.

    python -m training.canary.ship OUT/*.tar.gz
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


def ship(archive: Path) -> str:
    """Unpacks one member's archive; what was done."""
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(archive) as tar:
        tar.extractall(scratch, filter="data")
        member = next(Path(scratch).iterdir())
        (HERE / "logs").mkdir(exist_ok=True)
        if (member / "log.jsonl").exists():
            shutil.copy(member / "log.jsonl", HERE / "logs" / f"{member.name}.jsonl")
        if not (member / "model").exists():
            return f"{member.name}: no model in {archive}"
        place = MODEL if member.name == "canary" else ASSETS / member.name
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(member / "model", place)
        for path in place.iterdir():
            path.chmod(0o644)
        return f"{member.name}: {place}"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archives", nargs="+", type=Path)
    for archive in parser.parse_args().archives:
        print(ship(archive))  # noqa: T201


if __name__ == "__main__":
    main()
