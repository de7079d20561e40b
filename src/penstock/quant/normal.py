"""bitsandbytes' NF4 and FP4: codes of 4 bits that look up a table, times a scale for each block."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from penstock.ops.bits import blocks, nearest, pack, spread
from penstock.quant.microscaling import _looked_up
from penstock.quant.scheme import Part, Weights

TABLES = {
    "nf4": (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022833234,
            -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
            0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    "fp4": (0.0, 0.005208333333333333, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25, 0.0, -0.005208333333333333, -2 / 3, -1.0, -1 / 3,
            -0.5, -1 / 6, -0.25)}
"""By code: the tables of the QLoRA paper (Dettmers et al. 2023, appendix E) and of bitsandbytes' FP4."""


@dataclass(frozen=True)
class Table4(Weights):
    """weight = table[code] * absmax of its block; codes low bits first."""

    name: str = "nf4"
    block: int = 64

    @property
    def grain(self) -> tuple[int, int]:
        return 1, self.block

    def parts(self, n: int, k: int, _dtype: str) -> tuple[Part, ...]:
        return Part("weight", (n, k // 2), "uint8"), Part("absmax", (n, -(-k // self.block)), "float32")

    def encode(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        absmax = blocks(matrix.float().abs(), self.block).amax(-1).clamp_min(1e-12)
        x = matrix.float() / spread(absmax, self.block, matrix.shape[-1])
        return {"weight": pack(nearest(x, TABLES[self.name]), 4), "absmax": absmax}

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        values = _looked_up(parts["weight"], TABLES[self.name])
        return (values * spread(parts["absmax"], self.block, values.shape[-1])).to(dtype)
