"""Runs a model over a calibration text, and sums up the second moments of each projection's inputs, for GPTQ.

One block at a time, as its matrices are asked for: the moments of a whole model would take more memory than the model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.layers.step import Delta
from penstock.worker.windows import Windows


class Moments(Delta):
    """The plain model in memory, and the text as windows of token ids. As a step's delta, it adds nothing."""

    def __init__(self, folder: Path, config: dict[str, Any], dtype: str, device: str, windows: Sequence[Sequence[int]]) -> None:
        self._windows = [torch.tensor(window, dtype=torch.int32) for window in windows]
        self._reader = Windows(folder, config, dtype, device, max(map(len, windows)))
        self._block, self._found, self._peaks = "", dict[str, torch.Tensor](), dict[str, torch.Tensor]()

    def of(self, path: str) -> torch.Tensor | None:
        """The sum of x x^T [k, k], float32, over the inputs x of the projection at `path` ("blocks.0.mlp.down"), or None."""
        block = ".".join(path.split(".")[:2])
        if block != self._block:
            self._block, self._found, self._peaks = block, {}, {}
            with torch.inference_mode():
                for window in self._windows:
                    self._reader.read(window, self)
        return self._found.get(path)

    def peaks(self, path: str) -> torch.Tensor | None:
        """The largest magnitudes [k] of these inputs."""
        self.of(path)
        return self._peaks.get(path)

    def shrink(self, path: str, x: torch.Tensor, /) -> None:
        """Every projection asks for this, with its inputs."""
        if path.startswith(self._block + "."):
            x = x.float()
            if path in self._found:
                self._found[path].addmm_(x.t(), x)
                self._peaks[path] = torch.maximum(self._peaks[path], x.abs().amax(0))
            else:
                self._found[path], self._peaks[path] = x.t() @ x, x.abs().amax(0)
