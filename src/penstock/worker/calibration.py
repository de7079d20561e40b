"""Runs a model over a calibration text, and sums up the second moments of each projection's inputs, for GPTQ.

One block at a time, as its matrices are asked for: the moments of a whole model would take more memory than the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock import models
from penstock.core.layout import lay_out
from penstock.layers.step import GroupStep, Step
from penstock.ops.registry import bind
from penstock.platform.facts import detect, device_name
from penstock.worker.arena import Arena

_PAGE = 16


class Moments:
    """The plain model in memory, and the text as windows of token ids."""

    def __init__(self, folder: Path, config: dict[str, Any], dtype: str, device: str,
                 windows: Sequence[Sequence[int]]) -> None:
        facts = detect(device)
        self._device, kind = torch.device(device_name(device, facts)), getattr(torch, dtype)
        self._windows = [torch.tensor(window, dtype=torch.int32) for window in windows]
        longest = max(map(len, windows))
        self._model = models.load(folder, config, dtype=kind, device=self._device, kernels=bind(facts, kind),
                                  load_format="auto", max_model_len=longest, seed=0)
        none = lay_out(self._model.states, _PAGE, 0)
        room = none.slab_bytes * (none.slabs_for(longest, longest) + 1)
        arena = Arena(lay_out(self._model.states, _PAGE, room), self._device)
        self._groups = len(none.groups)
        self._model.attach(arena.views(self._model.states))
        self._block, self._found = "", dict[str, torch.Tensor]()

    def of(self, path: str) -> torch.Tensor | None:
        """The sum of x x^T [k, k], float32, over the inputs x of the projection at `path` (as "blocks.0.mlp.down"); None if
        none was computed there."""
        block = ".".join(path.split(".")[:2])
        if block != self._block:
            self._block, self._found = block, {}
            with torch.inference_mode():
                for window in self._windows:
                    self._run(window.to(self._device))
        return self._found.get(path)

    def shrink(self, path: str, x: torch.Tensor, /) -> None:
        """As a step's delta (`layers/step.py::Delta`), which every projection asks. It adds nothing."""
        if path.startswith(self._block + "."):
            x = x.float()
            if path in self._found:
                self._found[path].addmm_(x.t(), x)
            else:
                self._found[path] = x.t() @ x

    def expand(self, _path: str, _low: torch.Tensor | None, out: torch.Tensor, _bias: torch.Tensor | None, /) -> torch.Tensor:
        return out

    def embed(self, _tokens: torch.Tensor, out: torch.Tensor, /) -> torch.Tensor:
        return out

    def head(self, _x: torch.Tensor, out: torch.Tensor, _bias: torch.Tensor | None, /) -> torch.Tensor:
        return out

    def _run(self, tokens: torch.Tensor) -> None:
        """One window as a prompt."""
        model, count = self._model, len(tokens)
        columns = -(-count // _PAGE)
        zero, ends = (torch.tensor(values, dtype=torch.int32, device=self._device) for values in ([0], [0, count]))
        tables = [torch.arange(columns, dtype=torch.int32, device=self._device)[None]] * self._groups
        built = model.kernels.build_step(tokens[None], tables, zero, zero, ends, _PAGE, count, columns)
        counts = np.array([count], np.int32)
        work = [one.ops.prepare(one.geometry, counts, counts, 1, count) for one in model.works]
        model.forward(Step(built.tokens, built.positions, ends, ends[1:], [
            GroupStep(table, slots) for table, slots in zip(built.tables, built.slots, strict=True)],
            [None if one is None else torch.from_numpy(one).to(self._device) for one in work], [[] for _ in work], delta=self))
