"""Canary: a small model family trained by this project, whose skills are exact and checkable, and the prompts that check them.

Owns the prompts (`skills`, `calling`), their grading (`item`), the suite that they make (`suite`), and the packaged model's
folder. No torch, no engine: training and evaluation both build on it. `training/canary` in the repository trains the family."""

from pathlib import Path

from penstock.core.errors import ModelError

NAME = "canary"
"""The packaged model's name where a folder or hub id is expected; it runs if no model is named."""

MODEL = Path(__file__).parent / "model"
"""The packaged model, a Hugging Face folder."""


def model_folder() -> Path:
    """The packaged model's folder. ModelError if this installation has none."""
    if not (MODEL / "config.json").exists() or not list(MODEL.glob("*.safetensors")):
        raise ModelError(f"this installation has no weights of canary, the model that runs if none is named: not in {MODEL}. "
                         "Name another model, a Hugging Face folder or hub id; or train canary: training/canary/README.md")
    return MODEL
