"""How often what drafts for a member writes what the member writes: the acceptance that speculative decoding would see.

    python -m training.canary.acceptance canary-draft          # or canary-eagle, canary-mla (its multi-token prediction layer)

A loop of its own, in transformers and float32, greedy: the member answers held-out prompts; then, along each answer, the draft
is asked at every place what it would draft there. A draft goes on only while it is right, so all it has to go on is the
member's own text, and every step of every draft can be computed in one pass. Puts the figures into `scores.json`; `cards`
writes them out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from training.canary import record
from training.canary.evaluate import Reference
from training.canary.heads import Eagle, NextToken, features
from training.canary.masks import seen_within
from training.canary.ship import place
from transformers import AutoModelForCausalLM

from penstock.canary.suite import SKILLS, prompts

COUNT = 20
"""Prompts for each skill."""

Drafted = Callable[[torch.Tensor], list[list[int]]]
"""Of the tokens [1, L] of prompt and answer: for each step of a draft, what it would write at each place, L numbers (-1:
nothing; it would have to begin before the text)."""


def steps(agreed: Sequence[Sequence[bool]]) -> int:
    """Steps of the member for an answer. The first is the prompt's and gives one token; each other takes the drafted tokens up
    to the first wrong one, and adds one of its own.

    agreed[k][n]: whether token n is right when it is drafted as number k of a draft.
    """
    depth, length = len(agreed), len(agreed[0])
    done = count = 1
    while done < length:
        right = 0
        while right < depth and done + right < length and agreed[right][done + right]:
            right += 1
        done, count = done + right + 1, count + 1
    return count


def by_model(reference: Reference) -> Drafted:
    """Of canary-draft, four tokens at a time: what it writes depends on the text alone, not on where its draft began."""
    draft = AutoModelForCausalLM.from_pretrained(place("canary-draft"), dtype=torch.float32).eval()
    return lambda ids: [[-1, *draft(ids).logits[0, :-1].argmax(-1).tolist()]] * 4


def by_eagle(reference: Reference) -> Drafted:
    """Of canary-eagle, four tokens at a time."""
    head, trunk = Eagle.load(place("canary-eagle")).eval(), reference.model

    def drafted(ids: torch.Tensor) -> list[list[int]]:
        states, _ = features(trunk, ids, {})
        embeds, length = trunk.model.embed_tokens(ids), ids.shape[1] - 2
        positions = torch.arange(length)[None]
        rolled = head(embeds[:, 1:-1], states[:, :-2], positions, seen_within(torch.ones(1, length, dtype=torch.long)), 4)
        targets = head.targets()
        # At place t it drafts the token at t + 2; step k of a draft has k places of its own before.
        return [[-1] * (2 + step) + targets[logits[0, step:].argmax(-1)].tolist() for step, logits in enumerate(rolled)]

    return drafted


def by_next(reference: Reference) -> Drafted:
    """Of canary-mla's layer, one token at a time."""
    layer, trunk = NextToken.load(place("canary-mla")).eval(), reference.model

    def drafted(ids: torch.Tensor) -> list[list[int]]:
        hidden = trunk.model(input_ids=ids).last_hidden_state
        states = layer(trunk.model.embed_tokens(ids)[:, 1:-1], hidden[:, :-2], {})
        return [[-1, -1, *trunk.lm_head(states)[0].argmax(-1).tolist()]]

    return drafted


DRAFTS: dict[str, tuple[str, Callable[[Reference], Drafted]]] = {
    "canary-draft": ("canary", by_model), "canary-eagle": ("canary", by_eagle), "canary-mla": ("canary-mla", by_next)}
"""The drafter, the member that it drafts for, and how it is asked."""


def figures(name: str, count: int) -> dict[str, object]:
    """The acceptance over `count` prompts of each skill; `shares` are by the number of the token in its draft."""
    member, by = DRAFTS[name]
    reference = Reference(place(member))
    drafted, answers = by(reference), []
    for skill in SKILLS:
        for answer in filter(None, reference.answers(prompts(skill, count))):
            with torch.inference_mode():
                wrote = drafted(torch.tensor([[*answer.ids, *answer.said]]))
            first = len(answer.ids)
            answers.append([[mine == theirs for mine, theirs in zip(each[first:], answer.said, strict=True)] for each in wrote])
    tokens = sum(len(each[0]) for each in answers)
    # The first token of an answer is never drafted.
    after = [[sum(each[step][1:]) for each in answers] for step in range(len(answers[0]))]
    return {"prompts": len(answers), "tokens": tokens, "depth": len(answers[0]),
            "shares": [round(sum(right) / (tokens - len(answers)), 4) for right in after],
            "tokens_a_step": round(tokens / sum(map(steps, answers)), 2)}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=DRAFTS)
    parser.add_argument("--prompts", type=int, default=COUNT, help="prompts for each skill")
    args = parser.parse_args()
    found = figures(args.name, args.prompts)
    record.add(place(args.name), {"acceptance": found})
    print(found)  # noqa: T201


if __name__ == "__main__":
    main()
