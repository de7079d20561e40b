"""Every family against transformers on small random float32 models: logits within 1e-4, 64 greedy tokens equal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.ops.registry import bind
from penstock.platform.facts import detect
from tests.models.families import CASES, PROMPT, Case, make
from tests.models.harness import Runner, open_model


def greedy(model: torch.nn.Module, prompt: list[int], count: int) -> tuple[torch.Tensor, list[int]]:
    """(logits of the prompt, the tokens that follow) by transformers, with its cache."""
    with torch.inference_mode():
        out = model(torch.tensor([prompt]), use_cache=True)
        logits, ids = out.logits[0], []
        last, cache = logits[-1], out.past_key_values
        for i in range(count):
            ids.append(int(last.argmax()))
            if i + 1 < count:
                out = model(torch.tensor([ids[-1:]]), past_key_values=cache, use_cache=True)
                last, cache = out.logits[0, -1], out.past_key_values
    return logits, ids


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_transformers(case: Case, tmp_path: Path) -> None:
    model = make(case, tmp_path)
    prompt = torch.randint(3, case.config["vocab_size"], (PROMPT,), generator=torch.Generator().manual_seed(5)).tolist()
    expected, ids = greedy(model, prompt, case.greedy)
    assert expected.std() > 0.5, "logits too alike to tell anything"
    decoder = open_model(tmp_path, max_model_len=case.max_model_len)
    logits, found, _ = Runner(decoder, length=case.max_model_len).greedy(prompt, case.greedy, row=1)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert found == ids
    native = open_model(tmp_path, max_model_len=case.max_model_len, kernels=bind(detect("cpu"), torch.float32))
    logits, found, _ = Runner(native, length=case.max_model_len).greedy(prompt, min(case.greedy, 8))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert found == ids[:8]
