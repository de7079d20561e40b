"""Where the tests find real models, tokenizers, templates and texts. They are not part of this project."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("PENSTOCK_TEST_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
MODELS = DATA / "models"
TRAINED = ("stories260k", "babyllama-tok105", "babyllama-tok361")
"""Small trained Llama-shaped models, float32, each with greedy_golden.json."""


def need(path: Path) -> Path:
    """`path`, or a skip that says what is missing."""
    if not path.exists():
        pytest.skip(f"test data {path.name} is not here; set PENSTOCK_TEST_DATA to the folder that has it")
    return path
