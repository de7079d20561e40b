"""bf16 and fp16 against float32: no further from the truth than transformers in the same precision."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from penstock import canary
from tests.gpu.conftest import engine, updates


def _theirs(prompts: list[list[int]], dtype: torch.dtype) -> list[torch.Tensor]:
    """Log probabilities that transformers gives the prompts' own tokens."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(canary.MODEL, dtype=dtype)
    model = loaded.cuda().eval()
    found = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt], device="cuda")
            lines = model(ids).logits[0, :-1].float().log_softmax(-1)
            found.append(lines.gather(1, ids[0, 1:, None])[:, 0].cpu())
    return found


def _ours(prompts: list[list[int]], dtype: str) -> list[torch.Tensor]:
    with engine(model=canary.NAME, dtype=dtype) as made:
        found = updates(made, prompts, 1, prompt_logprobs=0)
    return [torch.tensor([line.logprobs[0] for line in mine[0].prompt_logprobs or ()]) for mine in found]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(10, 4000) for _ in range(length)] for length in (5, 60, 300, 900)]


def _error(found: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    return float(torch.cat([a - b for a, b in zip(found, truth, strict=True)]).square().mean().sqrt())


def test_float32(prompts: list[list[int]]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    assert _error(_ours(prompts, "float32"), _theirs(prompts, torch.float32)) < 2e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half(dtype: str, prompts: list[list[int]]) -> None:
    truth = _theirs(prompts, torch.float32)
    ours, theirs = _error(_ours(prompts, dtype), truth), _error(_theirs(prompts, getattr(torch, dtype)), truth)
    print(f"{dtype}: ours {ours:.5f}, transformers' {theirs:.5f}")
    assert ours <= 1.1 * theirs
