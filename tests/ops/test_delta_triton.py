"""Triton's gated delta rule against a loop over tokens; interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.ops.interpreter import DEVICE, DTYPES  # isort: skip  (before Triton's kernels are imported)

from penstock.ops.delta import DeltaShape
from penstock.ops.delta_triton import delta_rule
from tests.ops.delta import SHAPES, Tape, follow

ON_GPU = DEVICE.type == "cuda"


@pytest.mark.skipif(not ON_GPU, reason="the interpreter takes minutes")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("most", [0, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_division_into_steps(shape: DeltaShape, most: int, dtype: torch.dtype) -> None:
    for seed in range(8):
        assert follow(Tape(shape, most, DEVICE, dtype), delta_rule, seed, padding=1) > 4


@pytest.mark.parametrize("shape, most, dtype", [(SHAPES[1], 0, DTYPES[1]), (SHAPES[2], 3, DTYPES[0])], ids=str)
def test_prompts_drafts_and_borders(shape: DeltaShape, most: int, dtype: torch.dtype) -> None:
    """Few steps, for the interpreter: a prompt, drafts that are rejected over a border of pages, and a second row."""
    tape = Tape(shape, most, DEVICE, dtype, 16)
    tape.step(delta_rule, [(0, 6, 6)], padding=1)
    tape.step(delta_rule, [(1, 1, 1), (0, 1 + most, 1)], padding=1)
    tape.step(delta_rule, [(0, 1 + most, 1 + most // 2)])
    tape.step(delta_rule, [(0, most + 2, most + 2), (1, 1, 1)])
    assert tape.computed[:2] == [6 + 1 + 1 + most // 2 + most + 2, 2]


@pytest.mark.skipif(not ON_GPU, reason="the interpreter's sums have one order")
def test_bits_of_a_token_wherever_steps_end() -> None:
    """And whatever drafts were beside it."""
    whole, parts = (Tape(SHAPES[0], 3, DEVICE) for _ in range(2))
    found: list[torch.Tensor] = []

    def run(*arguments: object) -> torch.Tensor:
        found.append(delta_rule(*arguments))  # type: ignore[arg-type]
        return found[-1]

    whole.step(run, [(0, 150, 150)])
    for count, right in ((4, 2), (1, 1), (64, 64), (4, 1), (3, 3), (79, 79)):
        parts.step(run, [(0, count, right)])
        assert torch.equal(found[-1][:right], found[0][parts.computed[0] - right:parts.computed[0]])


@pytest.mark.skipif(not ON_GPU, reason="the interpreter runs one program after another")
def test_more_heads_than_run_at_once() -> None:
    """Programs of a page begin long after others of it have ended."""
    tape = Tape(DeltaShape(8, 512, 128, 128, 4, 1e-6), 3, DEVICE, length=12)
    assert follow(tape, delta_rule, 1) > 4
