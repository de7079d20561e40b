"""Writes a member's model card anew from its folder, with what `penstock eval canary` measured if that is given.

    penstock eval canary FOLDER --json > scores.json && python -m training.canary.cards NAME FOLDER scores.json

Owns the section of scores through Penstock; the rest is written by `export`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from training.canary.export import card
from training.canary.members import MEMBERS

HEADING, NEXT = "## Scores through Penstock", "## Training"


def section(scores: Sequence[Mapping[str, Any]]) -> str:
    """The table of scores, each as `penstock eval --json` gives it."""
    lines = [f"| {s['skill']} | {s['right']} of {s['asked']} | {s['share']:.1%} | {s['low']:.1%} to {s['high']:.1%} |"
             for s in scores]
    left_out = sum(s["left_out"] for s in scores)
    note = f"\n{left_out} prompts did not fit the context of 4,096 tokens and were not asked.\n" if left_out else ""
    return "\n".join([HEADING, "", "`penstock eval canary` on a CPU: other held-out prompts, decoded token by token.",
                      "", "| skill | right | share | 95 % interval |", "|---|---|---|---|", *lines, note])


def with_scores(text: str, scores: Sequence[Mapping[str, Any]]) -> str:
    """The card with these scores before its section on training."""
    head, rest = text.split(NEXT, 1)
    return head + section(scores) + "\n" + NEXT + rest


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=MEMBERS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("scores", type=Path, nargs="?")
    args = parser.parse_args()
    weights = args.folder / "model.safetensors"
    with safe_open(weights, "np") as file:
        parameters = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 - no mapping
    facts = json.loads((args.folder / "scores.json").read_text())
    text = card(MEMBERS[args.name], parameters, weights.stat().st_size, facts["scores"], facts)
    if args.scores is not None:
        text = with_scores(text, json.loads(args.scores.read_text())["scores"])
    (args.folder / "README.md").write_text(text)


if __name__ == "__main__":
    main()
