"""Canary: a small model family trained by this project, whose skills are exact and checkable, and the prompts that check them.

Owns the prompts (`skills`, `calling`), their grading (`item`), and the packaged model's folder. No torch, no engine: training
and evaluation both build on it. How the family is trained: `training/canary` in the repository.
"""

from __future__ import annotations

from pathlib import Path

MODEL = Path(__file__).parent / "model"
"""The packaged model, a Hugging Face folder: what `penstock serve` and `penstock chat` run if no model is named."""
