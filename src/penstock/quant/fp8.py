"""FP8: float8_e4m3fn codes with a scale for each row, or for each block."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from penstock.ops.bits import blocks, spread
from penstock.quant.scheme import FP8_MAX, Activation, Part, rounded


@dataclass(frozen=True)
class FP8:
    """weight = code * scale. A scale of a whole tensor is stored once for each of its rows."""

    activation: Activation = "none"
    block: tuple[int, int] | None = None
    """Rows and columns of a block that shares a scale; None: a scale a row."""

    @property
    def name(self) -> str:
        return "fp8" if self.block is None else "fp8_block"

    @property
    def grain(self) -> tuple[int, int]:
        return self.block or (1, 1)

    def parts(self, n: int, k: int, _dtype: str) -> tuple[Part, ...]:
        scale = Part("scale", (n,), "float32", columns=None) if self.block is None else Part(
            "scale", (-(-n // self.block[0]), -(-k // self.block[1])), "float32")
        found = (Part("weight", (n, k), "float8_e4m3fn"), scale)
        return (*found, Part("input_scale", (1,), "float32", None, None)) if self.activation == "tensor" else found

    def encode(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        x = matrix.float()
        if self.block is None:
            peak = x.abs().amax(-1)
        else:
            peak = blocks(blocks(x.abs(), self.block[1]).amax(-1).mT, self.block[0]).amax(-1).mT.contiguous()
        scale = peak.clamp_min(1e-12) / FP8_MAX
        codes = (x / self._spread(scale, matrix.shape)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        found = {"weight": codes, "scale": scale}
        return {**found, "input_scale": torch.ones(1, device=x.device)} if self.activation == "tensor" else found

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        return (parts["weight"].float() * self._spread(parts["scale"], parts["weight"].shape)).to(dtype)

    def inputs(self, x: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return rounded(x, self.activation, parts.get("input_scale"), torch.float8_e4m3fn)

    def _spread(self, scale: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        if self.block is None:
            return scale[..., None]
        return spread(spread(scale, self.block[1], shape[-1]).mT, self.block[0], shape[-2]).mT
