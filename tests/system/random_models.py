"""Models with random weights, wide enough that their continuations vary, saved as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def saved_random(model: Any, folder: Path, deviation: float) -> Path:
    """The folder, with a transformers model in it whose parameters are all drawn anew from a normal distribution."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, deviation)
    model.save_pretrained(folder)
    return folder
