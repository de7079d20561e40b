"""A mixture with a shared network over latents: log probabilities by every kind of kernel, in steps of any size."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from fixed import SHAPES, write
from tests.gpu.conftest import engine, generate, updates

SMALL = SHAPES["dsv2lite"] | {
    "num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1024, "n_routed_experts": 24, "moe_intermediate_size": 256,
    "vocab_size": 2048, "bos_token_id": 0, "eos_token_id": 1}
LENGTHS = (3, 40, 200, 512, 512, 512, 600, 1024, 1500)


def _scores(model: Path, prompts: list[list[int]], **options: Any) -> list[torch.Tensor]:
    with engine(model=str(model), load_format="dummy", skip_tokenizer_init=True, max_model_len=2048, **options) as made:
        found = updates(made, prompts, 1, prompt_logprobs=0)
    return [torch.tensor([line.logprobs[0] for line in mine[0].prompt_logprobs or ()]) for mine in found]


@pytest.mark.parametrize("scheme", [None, "fp8"])
def test_steps_of_any_size_agree(scheme: str | None, tmp_path: Path) -> None:
    """With float32, whose kernels do none of this: steps of 8,192 tokens (prompts in groups, TMA, the shared network on
    its own), of 300 (tiles of two heights), of 24 (absorbed latents, all experts in one launch) and of 3 (one by one)."""
    model, rng = write(SMALL, tmp_path / "model"), random.Random(4)
    prompts = [[rng.randrange(2, 2000) for _ in range(length)] for length in LENGTHS]
    exact = _scores(model, prompts, quantization=scheme, dtype="float32", max_num_batched_tokens=8192)
    errors = []
    for tokens, some in ((8192, 9), (300, 9), (24, 3), (3, 2)):
        found = _scores(model, prompts[:some], quantization=scheme, max_num_batched_tokens=tokens, max_num_seqs=3)
        # The median, as near ties of the router go either way.
        errors.append(float(torch.cat([(mine - wanted).abs() for mine, wanted in zip(found, exact, strict=False)]).median()))
    print(f"{scheme}: {errors}")
    # Activations of float32 are not rounded to codes.
    assert errors[0] < (0.03 if scheme is None else 0.2)
    assert max(errors) < 1.3 * errors[0]



def test_a_sequence_beside_others(tmp_path: Path) -> None:
    """Decoding through graphs of one and of many rows picks the same tokens at first, whatever else is in the step."""
    model, rng = write(SMALL, tmp_path / "model"), random.Random(5)
    prompts = [[rng.randrange(2, 2000) for _ in range(30)] for _ in range(40)]
    with engine(model=str(model), load_format="dummy", skip_tokenizer_init=True, max_model_len=2048) as made:
        alone = [generate(made, [prompt], 6)[0] for prompt in prompts[:12]]
        made.reset_prefix_cache()
        beside = generate(made, prompts, 6)[:12]
    same = sum(one[0] == other[0] for one, other in zip(alone, beside, strict=True))
    assert same >= 11, (same, alone, beside)
