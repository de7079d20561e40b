"""Puts what `penstock eval canary` measured into a member's model card, in place of an earlier measurement.

    penstock eval canary FOLDER --json > scores.json && python -m training.canary.cards FOLDER scores.json

Owns that section of the card; the rest is written by `export`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HEADING, NEXT = "## Scores through Penstock", "## Training"


def section(scores: Sequence[Mapping[str, Any]]) -> str:
    """The table of scores, each as `penstock eval --json` gives it."""
    lines = [f"| {s['skill']} | {s['right']} of {s['asked']} | {s['share']:.1%} | {s['low']:.1%} to {s['high']:.1%} |"
             for s in scores]
    left_out = sum(s["left_out"] for s in scores)
    note = f"\n{left_out} prompts did not fit the context of 4,096 tokens and were not asked.\n" if left_out else ""
    return "\n".join([HEADING, "", "`penstock eval canary` on a CPU: other held-out prompts, decoded token by token.",
                      "", "| skill | right | share | 95 % interval |", "|---|---|---|---|", *lines, note])


def replaced(card: str, scores: Sequence[Mapping[str, Any]]) -> str:
    """The card with these scores before its section on training."""
    head, rest = card.split(NEXT, 1)
    return head.split(HEADING)[0] + section(scores) + "\n" + NEXT + rest


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("scores", type=Path)
    args = parser.parse_args()
    path = args.folder / "README.md"
    path.write_text(replaced(path.read_text(), json.loads(args.scores.read_text())["scores"]))


if __name__ == "__main__":
    main()
