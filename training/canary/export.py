"""A trained member as a Hugging Face folder: weights in bfloat16, tokenizer, chat template, scores.json, model card."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from training.canary import cards, record
from training.canary.members import Member
from training.canary.tokenizer import FOLDER
from transformers import GenerationConfig


def export(model: Any, member: Member, folder: Path, facts: Mapping[str, Any]) -> None:
    """Writes the folder. `facts` are what scores.json holds."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in model.state_dict().items()}
    model.config.dtype = torch.bfloat16
    model.config.use_cache = True
    model.generation_config = GenerationConfig(eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id)
    fresh = type(model)(model.config).to(torch.bfloat16)
    fresh.load_state_dict(weights)
    fresh.generation_config = model.generation_config
    fresh.save_pretrained(folder)
    for path in FOLDER.iterdir():
        shutil.copy(path, folder)
    record.write(folder, facts)
    cards.write(member.name, folder)
