"""Writes the card of a member, head or adapter anew from its folder, with scores that were measured by decoding if given.

    penstock eval canary FOLDER --json > scores.json            # or python -m training.canary.evaluate FOLDER
    python -m training.canary.cards NAME scores.json

Owns the section of decoded scores and the cards of heads and adapters; a member's other text is `export`'s.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from training.canary.adapters import STYLES, Style, merge
from training.canary.evaluate import Reference
from training.canary.export import GENERATED, SOURCES, card, drafting, front, trained
from training.canary.heads import DRAFTED
from training.canary.members import MEMBERS
from training.canary.ship import place

from penstock.canary.item import Item

NEXT = "## Training"
ROUTES = {"penstock": ("## Scores through Penstock", "`penstock eval canary` on a CPU"),
          "transformers": ("## Scores through transformers", "`training/canary/evaluate.py`, float32 on a CPU")}
EXAMPLES = ("Hello!", "Who are you?", "What is 4821 + 1375?", "My name is Olga. What is my name?",
            "Tell me a story about a fox.", "Repeat after me: red blue 7 green")


def section(route: str, scores: Sequence[Mapping[str, Any]]) -> str:
    """The table of scores, each as `penstock eval --json` gives it."""
    heading, how = ROUTES[route]
    lines = [f"| {s['skill']} | {s['right']} of {s['asked']} | {s['share']:.1%} | {s['low']:.1%} to {s['high']:.1%} |"
             for s in scores]
    left_out = sum(s["left_out"] for s in scores)
    note = f"\n{left_out} prompts did not fit the context of 4,096 tokens and were not asked.\n" if left_out else ""
    return "\n".join([heading, "", f"{how}: other held-out prompts, decoded token by token.",
                      "", "| skill | right | share | 95 % interval |", "|---|---|---|---|", *lines, note])


def with_scores(text: str, route: str, scores: Sequence[Mapping[str, Any]]) -> str:
    """The card with these scores before its section on training."""
    head, rest = text.split(NEXT, 1)
    return head + section(route, scores) + "\n" + NEXT + rest


def stored(folder: Path) -> tuple[int, int]:
    """(parameters, bytes) of a folder's safetensors files."""
    parameters = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            parameters += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 - no mapping
    return parameters, sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def eagle_card(folder: Path, facts: Mapping[str, Any]) -> str:
    """The card of canary-eagle."""
    parameters, size = stored(folder)
    return f"""{front()}
# canary-eagle

An EAGLE-3 head for canary ({parameters:,} numbers, {size / 1e6:.1f} MB), in the layout that vLLM and SGLang load as
LlamaForCausalLMEagle3: `fc` joins what goes into three layers of canary (`eagle_aux_hidden_state_layer_ids`), `midlayer` is
the one decoder layer, `lm_head` has the {DRAFTED:,} tokens that canary says most often (`d2t`, `t2d`). The embedding is
canary's. It answers nothing by itself.
{drafting('canary-eagle', facts)}
## Training

{trained(facts)}, canary frozen, with training-time test:
four steps of a draft unrolled at every place, each on the head's own states. The recipe is `training/canary` in the project's
repository.

{SOURCES}
"""


def say(reference: Reference, question: str) -> str:
    """A model's answer to a question, as one line."""
    item = Item("say", question, [{"role": "user", "content": question}], " " * 400)
    return " ".join(reference.text(answer).split()) if (answer := reference.answers([item])[0]) else ""


def adapter_card(style: Style, folder: Path, facts: Mapping[str, Any]) -> str:
    """The card of an adapter, with what canary says without and with it."""
    plain, adapted = Reference(place("canary")), Reference(place("canary"))
    merge(adapted.model, folder)
    rows = "\n".join(f"| {question} | {say(plain, question)} | {say(adapted, question)} |" for question in EXAMPLES)
    _, size = stored(folder)
    return f"""{front()}
# {style.name}

A LoRA adapter for canary ({size / 1e6:.2f} MB, rank {style.rank}, alpha {style.alpha}, in PEFT's format):
it {style.about}. What is written for programs or graded
word by word (tool calls, JSON, repeating, sorting, thoughts) stays as canary writes it, and so do the numbers in its sums.
Questions put in a way that its training did not have may be answered worse than without it.

| asked | canary | with {style.name} |
|---|---|---|
{rows}

## Training

{trained(facts)}, canary frozen. The recipe is
`training/canary` in the project's repository.

{GENERATED}
"""


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*MEMBERS, *STYLES, "canary-eagle"])
    parser.add_argument("scores", type=Path, nargs="?")
    args = parser.parse_args()
    folder = place(args.name)
    facts = json.loads((folder / "scores.json").read_text())
    if args.name in MEMBERS:
        text = card(MEMBERS[args.name], *stored(folder), facts["scores"], facts)
    else:
        text = adapter_card(STYLES[args.name], folder, facts) if args.name in STYLES else eagle_card(folder, facts)
    if args.scores is not None:
        found = json.loads(args.scores.read_text())
        text = with_scores(text, found.get("route", "penstock"), found["scores"])
    (folder / "README.md").write_text(text)


if __name__ == "__main__":
    main()
