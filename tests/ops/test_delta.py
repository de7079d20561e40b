"""The gated delta rule's reference against a loop over tokens: chunks, single tokens, and states that go back."""

from __future__ import annotations

import pytest
import torch

from penstock.ops.delta import DeltaShape, delta_rule
from tests.ops.delta import SHAPES, Tape, follow
from tests.sampling import sampled

CPU = torch.device("cpu")


DIVISIONS = [(shape, most, (place + turn + seed) % 3) for place, shape in enumerate(SHAPES)
             for turn, most in enumerate((0, 3, 7)) for seed in range(3)]


@pytest.mark.parametrize("case", sampled(DIVISIONS, 3, name=str))
def test_every_division_into_steps(case: tuple[DeltaShape, int, int]) -> None:
    """The longest chunk of 70 tokens is more than one inside; up to `most` drafts are rejected, across borders of pages too."""
    shape, most, seed = case
    assert follow(Tape(shape, most, CPU), delta_rule, seed) > 10


def test_a_state_that_cannot_go_back_shows() -> None:
    """The test above can fail: without inputs kept behind the state, a rejected draft stays in it."""
    tape = Tape(SHAPES[0], 0, CPU)
    tape.step(delta_rule, [(0, 4, 2)])
    with pytest.raises(AssertionError):
        tape.step(delta_rule, [(0, 1, 1)])


def test_bits_of_a_row_depend_on_it_alone() -> None:
    """Not on others, nor on padding."""
    alone, together = Tape(SHAPES[0], 3, CPU), Tape(SHAPES[0], 3, CPU)
    found = []

    def run(*arguments: object) -> torch.Tensor:
        found.append(delta_rule(*arguments))  # type: ignore[arg-type]
        return found[-1]

    for count in (70, 1, 4, 1):
        alone.step(run, [(0, count, count)])
        together.step(run, [(0, count, count), (1, 1, 1), (2, count, count)], padding=2)
        assert torch.equal(found[-2], found[-1][:count])
