"""How often canary-draft writes what canary writes: the acceptance that speculative decoding would see, by a loop of its own.

    python -m training.canary.acceptance

Both are greedy, in float32; the draft, run by transformers, is asked for its choice at every place of canary's own answers,
which is what it would draft there. Puts the figures into the draft's `scores.json`; `cards` writes them out.
"""

from __future__ import annotations

import json

import torch
from training.canary.ship import ASSETS
from transformers import AutoModelForCausalLM

from penstock import LLM, SamplingParams
from penstock.canary.suite import SKILLS, prompts
from penstock.cli.eval import room

DEPTH = 4
"""Tokens drafted at a time."""
COUNT = 20
"""Prompts for each skill."""


def steps(agreed: list[bool], depth: int) -> int:
    """Steps of the model for an answer: each takes the drafted tokens up to the first wrong one, and adds one of its own."""
    done = count = 0
    while done < len(agreed):
        right = 0
        while right < depth and done + right < len(agreed) and agreed[done + right]:
            right += 1
        done, count = done + right + 1, count + 1
    return count


def main() -> None:
    """The command."""
    folder = ASSETS / "canary-draft"
    draft = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers: list[list[bool]] = []
    with LLM(dtype="float32") as llm:
        for skill in SKILLS:
            for item in prompts(skill, COUNT):
                text = llm.inputs.render(item.messages, tools=list(item.tools) or None,
                                         chat_template_kwargs={"enable_thinking": item.thinking})
                ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
                output = llm.generate(ids, SamplingParams(temperature=0, max_tokens=room(item)), use_tqdm=False)[0]
                said = list(output.outputs[0].token_ids)
                with torch.inference_mode():
                    chosen = draft(torch.tensor([[*ids, *said]])).logits[0, len(ids) - 1 : -1].argmax(-1).tolist()
                answers.append([mine == theirs for mine, theirs in zip(chosen, said, strict=True)])
    tokens = sum(map(len, answers))
    figures = {"prompts": len(answers), "tokens": tokens, "share": round(sum(map(sum, answers)) / tokens, 4), "depth": DEPTH,
               "tokens_a_step": round(tokens / sum(steps(answer, DEPTH) for answer in answers), 2)}
    path = folder / "scores.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "acceptance": figures}, indent=1) + "\n")
    print(figures)  # noqa: T201


if __name__ == "__main__":
    main()
