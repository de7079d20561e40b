"""Drafts on a GPU, whose passes are captured as CUDA graphs."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock import LLM, SamplingParams, canary
from penstock.core.request import Sequence
from penstock.scheduler.drafting import DraftPolicy

ASSETS = Path(__file__).parents[1] / "assets"
BEGINNINGS = [f"{'Once upon a time, ' * (i % 3)}there was a {animal} who lived {place}" for i, (animal, place) in enumerate(
    (animal, place) for place in ("in a wood", "by the sea", "on a farm") for animal in ("fox", "cat", "bear", "hen"))]


class Uneven(DraftPolicy):
    """One to `most` drafts, as the prompts' lengths have it."""

    def count(self, sequence: Sequence) -> int:
        return 1 + sequence.prompt_len % self.most


@pytest.mark.parametrize("draft", ["canary-eagle", "canary-draft"])
def test_captured_passes_draft_what_others_draft(draft: str) -> None:
    """1, 3 and 12 sequences with as many drafts each, and with unequal numbers, in float32: the same answers, and as many
    drafts kept as without graphs."""
    params, found = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True), {}
    for eager, config in ((True, None), (True, {}), (False, {})):
        given = {} if config is None else {"model": str(ASSETS / draft), "draft_policy": "fixed", "num_speculative_tokens": 4}
        with LLM(canary.NAME, device="cuda", dtype="float32", gpu_memory_utilization=0.2, max_model_len=512,
                 enforce_eager=eager, speculative_config=given) as llm:
            answers, kept = [], []
            for policy in (DraftPolicy(4), Uneven(4)):
                if given:
                    llm.engine.scheduler.drafts.policy = policy
                for count in (1, 3, 12):
                    outputs = llm.generate(BEGINNINGS[:count], params, use_tqdm=False)
                    answers.append([list(one.outputs[0].token_ids) for one in outputs])
                    kept.append(llm.engine.stats().accepted_tokens)
            found[eager, config is None] = answers, kept
            print(draft, eager, bool(given), kept, llm.engine.stats().drafted_tokens)
    plain, without, captured = found[True, True], found[True, False], found[False, False]
    assert captured[0] == plain[0] and without[0] == plain[0]
    assert 100 < without[1][-1] * 0.97 < captured[1][-1] < without[1][-1] * 1.03
