"""Small floating point numbers in short blocks: MXFP4 and MXFP8 (OCP Microscaling Formats 1.0) and NVIDIA's NVFP4.

Activations are not quantized: products of FP4 with FP4 need the units of Blackwell."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from penstock.ops.bits import FP4, blocks, nearest, pack, power_of_two, spread, table, unpack
from penstock.quant.scheme import FP8_MAX, Part, Weights

_MX = 32


@dataclass(frozen=True)
class MX(Weights):
    """E2M1 codes (4 bits), low bits first, or float8_e4m3fn codes (8), with a power of two (E8M0) for each 32."""

    bits: int

    grain = (1, _MX)

    @property
    def name(self) -> str:
        return f"mxfp{self.bits}"

    def parts(self, n: int, k: int, _dtype: str) -> tuple[Part, ...]:
        codes = Part("weight", (n, k * self.bits // 8), "uint8" if self.bits == 4 else "float8_e4m3fn")
        return codes, Part("scale", (n, -(-k // _MX)), "uint8")

    def encode(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = _exponents(matrix, 2 if self.bits == 4 else 8)
        x = matrix.float() / spread(power_of_two(scale), _MX, matrix.shape[-1])
        codes = pack(nearest(x, FP4), 4) if self.bits == 4 else x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        return {"weight": codes, "scale": scale}

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        values = _looked_up(parts["weight"], FP4) if self.bits == 4 else parts["weight"].float()
        return (values * spread(power_of_two(parts["scale"]), _MX, values.shape[-1])).to(dtype)


MXFP4, MXFP8 = partial(MX, 4), partial(MX, 8)


def _looked_up(packed: torch.Tensor, values: tuple[float, ...]) -> torch.Tensor:
    return table(values, packed.device)[unpack(packed, 4).long()]


def _exponents(matrix: torch.Tensor, largest: int) -> torch.Tensor:
    """The shared exponents, E8M0, of blocks of 32: floor(log2(peak)) minus the element type's largest exponent (6.3)."""
    peak = blocks(matrix.float().abs(), _MX).amax(-1)
    return (torch.frexp(peak).exponent - 1 - largest + 127).clamp(0, 254).to(torch.uint8)


@dataclass(frozen=True)
class NVFP4(Weights):
    """E2M1 codes, low bits first, with an E4M3 scale for each 16 and one float32 for the whole, stored once a row."""

    divides: bool = False
    """The scale of the whole divides (compressed-tensors) instead of multiplying (modelopt)."""

    name = "nvfp4"
    grain = (1, 16)

    def parts(self, n: int, k: int, _dtype: str) -> tuple[Part, ...]:
        return (Part("weight", (n, k // 2), "uint8"), Part("scale", (n, -(-k // 16)), "float8_e4m3fn"),
                Part("global_scale", (n,), "float32", columns=None))

    def encode(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        x = matrix.float()
        whole = x.abs().amax((-2, -1)).clamp_min(1e-12) / (FP8_MAX * FP4[7])
        scale = (blocks(x.abs(), 16).amax(-1) / FP4[7] / whole).clamp(2.0**-9, FP8_MAX).to(torch.float8_e4m3fn)
        codes = nearest(x / spread(scale.float() * whole, 16, matrix.shape[-1]), FP4)
        whole = 1 / whole if self.divides else whole
        return {"weight": pack(codes, 4), "scale": scale, "global_scale": whole.expand(matrix.shape[-2]).contiguous()}

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        values = _looked_up(parts["weight"], FP4)
        whole = parts["global_scale"][..., None]
        scale = parts["scale"].float() / whole if self.divides else parts["scale"].float() * whole
        return (values * spread(scale, 16, values.shape[-1])).to(dtype)
