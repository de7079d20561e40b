"""A model that reads windows of text as prompts, outside of an engine: for calibration and for training what drafts for it."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock import models
from penstock.core.state import lay_out
from penstock.layers.step import Delta, Step
from penstock.ops.registry import bind
from penstock.platform.facts import detect, device_name
from penstock.worker.arena import Arena

_PAGE = 16


class Windows:
    """The plain model in memory, with a cache for one window."""

    def __init__(self, folder: Path, config: dict[str, Any], dtype: str, device: str, longest: int) -> None:
        """`longest`: the most tokens of a window."""
        facts = detect(device)
        self.device, kind = torch.device(device_name(device, facts)), getattr(torch, dtype)
        self.model = models.load(folder, config, dtype=kind, device=self.device, kernels=bind(facts, kind), load_format="auto",
                                 max_model_len=longest, seed=0)
        none = lay_out(self.model.states, _PAGE, 0)
        room = none.slab_bytes * (none.slabs_for(longest, longest) + 1)
        arena = Arena(lay_out(self.model.states, _PAGE, room), self.device)
        self._groups = len(none.groups)
        self.model.attach(arena.views(self.model.states))

    def read(self, tokens: torch.Tensor, delta: Delta | None = None) -> tuple[Step, torch.Tensor]:
        """Reads one window [T] int32 as a prompt. Returns the step and the hidden states [T, width]."""
        model, count = self.model, len(tokens)
        columns = -(-count // _PAGE)
        zero, ends = (torch.tensor(values, dtype=torch.int32, device=self.device) for values in ([0], [0, count]))
        tables = [torch.arange(columns, dtype=torch.int32, device=self.device)[None]] * self._groups
        built = model.kernels.build_step(tokens.to(self.device)[None], tables, zero, zero, ends, _PAGE, count, columns)
        counts = np.array([count], np.int32)
        work = [one.ops.prepare(one.geometry, counts, counts, 1, count) for one in model.works]
        step = Step(
            built.tokens, built.positions, ends, ends[1:], built.groups,
            [None if one is None else torch.from_numpy(one).to(self.device) for one in work], [[] for _ in work], delta=delta)
        return step, model.forward(step)
