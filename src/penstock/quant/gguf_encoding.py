"""Numbers as GGUF blocks, rounded to nearest as ggml's reference quantizers do it. Only the types of 32 columns are written."""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock.core.errors import ModelError


def _half_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float16).view(torch.uint8)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    return codes[..., :16] & 15 | codes[..., 16:] << 4


def _high_bits(codes: torch.Tensor) -> torch.Tensor:
    bits = (codes >> 4).unflatten(-1, (4, 8)).int() << torch.arange(8, dtype=torch.int32, device=codes.device)
    found: torch.Tensor = bits.sum(-1).to(torch.uint8)
    return found


def _symmetric(x: torch.Tensor, middle: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of largest magnitude becomes the lowest code."""
    peak = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    scale = peak / -middle
    codes = torch.trunc(x * _inverse(scale) + (middle + 0.5)).clamp(0, 2 * middle - 1)
    return scale, codes.to(torch.uint8)


def _affine(x: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    low = x.amin(-1, keepdim=True)
    scale = (x.amax(-1, keepdim=True) - low) / steps
    return scale, low, torch.trunc((x - low) * _inverse(scale) + 0.5).clamp(0, steps).to(torch.uint8)


def _q4_0(x: torch.Tensor) -> torch.Tensor:
    scale, codes = _symmetric(x, 8)
    return torch.cat((_half_bytes(scale), _nibbles(codes)), -1)


def _q5_0(x: torch.Tensor) -> torch.Tensor:
    scale, codes = _symmetric(x, 16)
    return torch.cat((_half_bytes(scale), _high_bits(codes), _nibbles(codes)), -1)


def _q4_1(x: torch.Tensor) -> torch.Tensor:
    scale, low, codes = _affine(x, 15)
    return torch.cat((_half_bytes(scale), _half_bytes(low), _nibbles(codes)), -1)


def _q5_1(x: torch.Tensor) -> torch.Tensor:
    scale, low, codes = _affine(x, 31)
    return torch.cat((_half_bytes(scale), _half_bytes(low), _high_bits(codes), _nibbles(codes)), -1)


def _q8_0(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    scaled = x * _inverse(scale)
    # C's roundf: halves away from zero.
    codes = torch.sign(scaled) * torch.floor(scaled.abs() + 0.5)
    return torch.cat((_half_bytes(scale), codes.to(torch.int8).view(torch.uint8)), -1)


ENCODERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1,
                                                               "q8_0": _q8_0}


def encode(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """float32 [..., columns] as uint8 [..., bytes of a block]."""
    if kind not in ENCODERS:
        raise ModelError(f"weights cannot be quantized to {kind} here; possible GGUF types are {', '.join(ENCODERS)}")
    return ENCODERS[kind](blocks.contiguous())
