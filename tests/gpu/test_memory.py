"""Memory by accounting: what was predicted at start is what is used at the peak, and random loads never run out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock import LLM
from penstock.cli.bench.fixed import write
from penstock.cli.bench.memory import CONFIGURATIONS, predicted, soak

SECONDS = float(os.environ.get("PENSTOCK_TEST_SOAK_SECONDS", "15"))


@pytest.mark.parametrize("number", range(len(CONFIGURATIONS)))
def test_predicted_is_measured(number: int) -> None:
    """Weights, working memory, graphs and cache against the peak of what the driver says is gone, within 2 %."""
    found = predicted(*CONFIGURATIONS[number], seed=number)
    print(f"{number}: {found}")
    assert abs(found["error"]) < 0.02


def test_random_loads_at_the_defaults(tmp_path: Path) -> None:
    """Bursts of any lengths and features, with nearly all of the GPU's memory given away; each gets its tokens."""
    config, _ = CONFIGURATIONS[0]
    with LLM(str(write(config, tmp_path / "model")), load_format="dummy", skip_tokenizer_init=True) as llm:
        found = soak(llm, SECONDS)
    print(found)
    assert found["requests"] > 100
