"""A token's logits do not depend on the step that computed them: chunks, neighbours, mixed steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.ops.registry import bind
from penstock.platform.facts import detect
from tests.models.families import CASES, PROMPT, make
from tests.models.harness import Runner, open_model, reference


@pytest.mark.parametrize("kernels", ["reference", "default"])
@pytest.mark.parametrize("name", ["llama-plain", "gemma3-plain", "gemma4-reading", "gemma3n-active",
                                  "mistral-narrow", "neox-parallel",
                                  "gpt2-plain", "olmo2-grouped"])
def test_mixed_steps(name: str, kernels: str, tmp_path: Path) -> None:
    make(next(case for case in CASES if case.name == name), tmp_path)
    decoder = open_model(tmp_path, kernels=reference() if kernels == "reference" else bind(detect("cpu"), torch.float32))
    generator = torch.Generator().manual_seed(9)
    first, second = (torch.randint(3, 199, (PROMPT,), generator=generator).tolist() for _ in range(2))
    alone = [Runner(decoder, page=16).prompt(1, tokens) for tokens in (first, second)]
    runner = Runner(decoder, rows=3)
    logits: dict[int, list[torch.Tensor]] = {0: [], 2: []}

    def step(*segments: tuple[int, list[int]]) -> None:
        out = runner.step(segments).split([len(tokens) for _, tokens in segments])
        for (row, _), part in zip(segments, out, strict=True):
            logits[row].append(part)

    step((2, second[:40]))
    step((0, first[:9]), (2, second[40:41]))
    step((2, second[41:42]), (0, first[9:60]))
    step((0, first[60:61]), (2, second[42:43]))
    step((0, first[61:]), (2, second[43:]))
    for row, expected in ((0, alone[0]), (2, alone[1])):
        torch.testing.assert_close(torch.cat(logits[row]), expected, atol=2e-5, rtol=0)
