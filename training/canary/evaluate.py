"""The graded skills where `penstock eval` cannot ask them: of members that Penstock does not run yet, through transformers, as
the reference for the day it does; and of canary with an adapter merged into it, through Penstock.

    python -m training.canary.evaluate FOLDER > scores.json
    python -m training.canary.evaluate src/penstock/canary/model --adapter canary-pirate > scores.json

Prompts, grading and output are those of `penstock eval canary --json`; answers are decoded greedily in float32. With an
adapter, the skills whose answers it restyles are graded by the restyled answer, and `examples` are what is said without and
with it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from training.canary.adapters import STYLES, merge, styled
from training.canary.documents import CONTEXT
from training.canary.members import every_expert
from training.canary.render import render
from training.canary.ship import place
from transformers import AutoModelForCausalLM

from penstock import LLM, SamplingParams
from penstock.canary.item import Item
from penstock.canary.suite import ALL, Score, graded, prompts
from penstock.cli.eval import answers, as_json, chosen, room

TOGETHER = 12_000
"""Tokens of a batch, prompts and answers; longer prompts are asked alone."""
EXAMPLES = ("Hello!", "Who are you?", "What is 4821 + 1375?", "My name is Olga. What is my name?",
            "Tell me a story about a fox.", "Repeat after me: red blue 7 green")
"""Questions that show what an adapter changes, and what it does not."""


@dataclass(frozen=True)
class Said:
    """An answer: the prompt's tokens, the answer's, and whether it ended by itself (then the end's token is the last)."""

    ids: list[int]
    said: list[int]
    stopped: bool


class Reference:
    """A folder's model in transformers, greedy, in float32 on the CPU; with an adapter's folder, that merged into it."""

    def __init__(self, folder: Path, adapter: Path | None = None) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        every_expert(self.model)
        if adapter is not None:
            merge(self.model, adapter)
        self.end = self.model.config.eos_token_id

    def encode(self, item: Item) -> list[int]:
        """The prompt's tokens."""
        return self.tokenizer.encode(render(item.messages, item.tools, item.thinking, generate=True)).ids

    def text(self, said: Said) -> str:
        """An answer as text, without special tokens."""
        return self.tokenizer.decode(said.said)

    def answers(self, items: Sequence[Item]) -> list[Said | None]:
        """An answer for each item; None for those that do not fit the context."""
        encoded = [self.encode(item) for item in items]
        found: list[Said | None] = [None] * len(items)
        fitting = [k for k, item in enumerate(items) if len(encoded[k]) + room(item) <= CONTEXT]
        batch: list[int] = []
        for number in sorted(fitting, key=lambda k: len(encoded[k])):
            if batch and (len(batch) + 1) * (len(encoded[number]) + room(items[number])) > TOGETHER:
                self._ask(batch, items, encoded, found)
                batch = []
            batch.append(number)
        if batch:
            self._ask(batch, items, encoded, found)
        return found

    @torch.inference_mode()
    def _ask(self, batch: list[int], items: Sequence[Item], encoded: list[list[int]], found: list[Said | None]) -> None:
        """Answers of one batch, its prompts padded on the left."""
        longest = max(len(encoded[k]) for k in batch)
        ids = torch.tensor([[0] * (longest - len(encoded[k])) + encoded[k] for k in batch])
        mask = torch.tensor([[0] * (longest - len(encoded[k])) + [1] * len(encoded[k]) for k in batch])
        most = max(room(items[k]) for k in batch)
        out = self.model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=most, do_sample=False, use_cache=True)
        for k, tokens in zip(batch, out[:, longest:].tolist(), strict=True):
            said = tokens[: room(items[k])]
            stopped = self.end in said
            found[k] = Said(encoded[k], said[: said.index(self.end) + 1] if stopped else said, stopped)

    def score(self, items: Sequence[Item]) -> Score:
        """The score of items of one skill."""
        return graded(items, [each and (self.text(each), [], each.stopped) for each in self.answers(items)])


def ask(llm: LLM, question: str) -> str:
    """Penstock's answer to a question, as one line."""
    said = llm.chat([{"role": "user", "content": question}], SamplingParams(temperature=0, max_tokens=400), use_tqdm=False)
    return " ".join(said[0].outputs[0].text.split())


def with_adapter(folder: Path, adapter: str, skills: Sequence[str], count: int) -> dict[str, Any]:
    """The scores and examples of an adapter merged into a folder's model, of `count` prompts of each skill."""
    style, options = STYLES[adapter], {"dtype": "float32", "device": "cpu", "kv_cache_memory_bytes": 512 << 20}
    with LLM(str(folder), **options) as llm:
        plain = [ask(llm, question) for question in EXAMPLES]
    with tempfile.TemporaryDirectory() as scratch:
        merged = Path(scratch) / adapter
        shutil.copytree(folder, merged)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        merge(model, place(adapter))
        model.save_pretrained(merged)
        with LLM(str(merged), **options) as llm:
            groups = [[styled(item, style) for item in prompts(skill, count)] for skill in skills]
            scores = [as_json(graded(items, answers(llm, items))) for items in groups]
            examples = [(question, said, ask(llm, question)) for question, said in zip(EXAMPLES, plain, strict=True)]
    return {"route": "merged", "scores": scores, "examples": examples}


def through_transformers(folder: Path, skills: Sequence[str], count: int) -> dict[str, Any]:
    """The scores of a folder's model in transformers, of `count` prompts of each skill."""
    reference, scores = Reference(folder), []
    for skill in skills:
        scores.append(as_json(reference.score(prompts(skill, count))))
        sys.stderr.write(f"{skill} {scores[-1]['right']} of {scores[-1]['asked']}\n")
    return {"route": "transformers", "scores": scores}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--adapter", choices=STYLES, help="merge this adapter into it")
    parser.add_argument("--prompts", type=int, default=200, help="prompts for each skill")
    parser.add_argument("--skills", help=f"of {','.join(ALL)}")
    args = parser.parse_args()
    skills = chosen(args.skills)
    found = (with_adapter(args.folder, args.adapter, skills, args.prompts) if args.adapter
             else through_transformers(args.folder, skills, args.prompts))
    found |= {"suite": "canary", "model": args.adapter or args.folder.name, "prompts": args.prompts}
    print(json.dumps(found, indent=2))  # noqa: T201


if __name__ == "__main__":
    main()
