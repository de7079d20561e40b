"""Offline generation: offline.py MODEL [PROMPT ...]. All prompts are continued at once."""

from __future__ import annotations

import sys

from penstock import LLM, SamplingParams


def main(model: str, prompts: list[str]) -> None:
    llm = LLM(model)
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=60, seed=1)
    for output in llm.generate(prompts, params):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r} ({output.outputs[0].finish_reason})")
    llm.close()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:] or ["Once upon a time", "The best thing about rivers is"])
