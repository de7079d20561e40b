"""A training's records: its log, a line for each measurement, and scores.json in the folder that it makes. Owns both
formats; what is measured is others'.

scores.json: `steps`, `minutes`, `tokens`, `device` of the training; of a member also `scores` (shares of right answers by
skill, at the end of training) out of `prompts` each, and `earlier`, the training that it went on from; what was measured
afterwards: `decoded` (scores of answers decoded token by token, as `penstock eval --json` prints them), `acceptance`, an
adapter's `examples`; and `stories`, what was found when they were read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

FACTS = "scores.json"


def note(out: Path, member: str, step: int, seconds: float, loss: torch.Tensor, tokens: int, scores: Mapping[str, float],
         **more: Any) -> None:
    """Adds a line to the log of a training that writes to `out`; `seconds` and `tokens` are since it began, `scores` 0 to 1."""
    line = {"member": member, "step": step, "seconds": round(seconds, 1), "loss": round(loss.item(), 4), "tokens": tokens,
            **more, "scores": scores}
    with (out / "log.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def training(steps: int, seconds: float, tokens: int, device: torch.device) -> dict[str, Any]:
    """A finished training, as scores.json has it."""
    return {"steps": steps, "minutes": round(seconds / 60, 1), "tokens": tokens,
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU"}


def earlier(folder: Path) -> dict[str, Any]:
    """The training that a folder's model has had, without what was measured."""
    facts = read(folder)
    return {name: facts[name] for name in ("earlier", "steps", "minutes", "tokens", "device") if name in facts}


def read(folder: Path) -> dict[str, Any]:
    """The record of a folder's model."""
    found: dict[str, Any] = json.loads((folder / FACTS).read_text())
    return found


def write(folder: Path, facts: Mapping[str, Any]) -> None:
    """Records these facts and no others."""
    (folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n")


def add(folder: Path, facts: Mapping[str, Any]) -> None:
    """Records these facts too, in place of those of their names."""
    write(folder, {**read(folder), **facts})
