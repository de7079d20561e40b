"""The block types of GGUF files. A matrix stays as the file has it, in rows of blocks; `gguf_blocks.py` says what they mean.

Numbers become blocks here: the types of 32 columns are rounded to nearest as ggml's reference quantizers do it; Q4_K and Q6_K
by the range of each group, without ggml's search for better scales."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from penstock.core.errors import ModelError
from penstock.quant import gguf_blocks
from penstock.quant.scheme import Part, Weights


@dataclass(frozen=True)
class GGUF(Weights):
    """`name` is a type's name in lower case, as q4_k."""

    name: str

    @property
    def grain(self) -> tuple[int, int]:
        return 1, gguf_blocks.KINDS[self.name].columns

    def parts(self, n: int, k: int, _dtype: str) -> tuple[Part, ...]:
        return (Part("weight", (n, self.row_bytes(k)), "uint8"),)

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of k columns; ModelError if they are no whole blocks."""
        kind = gguf_blocks.KINDS[self.name]
        if k % kind.columns:
            raise ModelError(f"rows of {k} columns cannot be stored as {self.name}, whose blocks have {kind.columns}")
        return k // kind.columns * kind.nbytes

    def encode(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        self.row_bytes(matrix.shape[-1])
        if self.name not in ENCODERS:
            raise ModelError(f"weights cannot be quantized to {self.name} here; possible GGUF types are {', '.join(ENCODERS)}")
        blocks = matrix.float().unflatten(-1, (-1, gguf_blocks.KINDS[self.name].columns)).contiguous()
        return {"weight": ENCODERS[self.name](blocks).flatten(-2)}

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        kind = gguf_blocks.KINDS[self.name]
        return kind.decode(parts["weight"].unflatten(-1, (-1, kind.nbytes))).flatten(-2).to(dtype)


def _half_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float16).view(torch.uint8)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


def _bytes(codes: torch.Tensor, bits: int) -> tuple[torch.Tensor, ...]:
    """32 codes of 4 or 5 bits: the high bits of all, if there are five, then the nibbles."""
    nibbles = codes[..., :16] & 15 | codes[..., 16:] << 4
    high = (codes >> 4).unflatten(-1, (4, 8)).int() << torch.arange(8, dtype=torch.int32, device=codes.device)
    return (nibbles,) if bits == 4 else (high.sum(-1).to(torch.uint8), nibbles)


def _symmetric(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Q4_0, Q5_0: the number of largest magnitude becomes the lowest code."""
    middle, peak = 1 << bits - 1, x.gather(-1, x.abs().argmax(-1, keepdim=True))
    scale = peak / -middle
    codes = torch.trunc(x * _inverse(scale) + (middle + 0.5)).clamp(0, 2 * middle - 1).to(torch.uint8)
    return torch.cat((_half_bytes(scale), *_bytes(codes, bits)), -1)


def _affine(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Q4_1, Q5_1: the codes span the least to the largest number."""
    low, steps = x.amin(-1, keepdim=True), (1 << bits) - 1
    scale = (x.amax(-1, keepdim=True) - low) / steps
    codes = torch.trunc((x - low) * _inverse(scale) + 0.5).clamp(0, steps).to(torch.uint8)
    return torch.cat((_half_bytes(scale), _half_bytes(low), *_bytes(codes, bits)), -1)


def _q8_0(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    scaled = x * _inverse(scale)
    # C's roundf: halves away from zero.
    codes = torch.sign(scaled) * torch.floor(scaled.abs() + 0.5)
    return torch.cat((_half_bytes(scale), codes.to(torch.int8).view(torch.uint8)), -1)


def _q4_k(x: torch.Tensor) -> torch.Tensor:
    """Eight groups of 32: code * d * scale - dmin * least, scale and least of 6 bits."""
    groups = x.unflatten(-1, (8, 32))
    least = -groups.amin(-1).clamp_max(0)
    scale = (groups.amax(-1) + least).clamp_min(0) / 15
    heads = [(part.amax(-1, keepdim=True) / 63).to(torch.float16) for part in (scale, least)]
    small = [torch.round(part * _inverse(head.float())).clamp(0, 63) for part, head in zip((scale, least), heads, strict=True)]
    exact = [(head.float() * part)[..., None] for head, part in zip(heads, small, strict=True)]
    codes = torch.round((groups + exact[1]) * _inverse(exact[0])).clamp(0, 15).to(torch.uint8)
    s, m = (part.to(torch.uint8) for part in small)
    packed = torch.cat((s[..., :4] | s[..., 4:] >> 4 << 6, m[..., :4] | m[..., 4:] >> 4 << 6,
                        s[..., 4:] & 15 | (m[..., 4:] & 15) << 4), -1)
    nibbles = (codes[..., 0::2, :] | codes[..., 1::2, :] << 4).flatten(-2)
    return torch.cat((*(head.view(torch.uint8) for head in heads), packed, nibbles), -1)


def _q6_k(x: torch.Tensor) -> torch.Tensor:
    """Sixteen groups of 16: (code - 32) * d * scale, scale of 8 bits."""
    groups = x.unflatten(-1, (16, 16))
    peak = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -32
    head = (peak.abs().amax(-2) / 127).to(torch.float16)
    small = torch.round(peak * _inverse(head.float())[..., None]).clamp(-127, 127)
    codes = torch.round(groups * _inverse(small * head.float()[..., None])).clamp(-32, 31) + 32
    halves = codes.to(torch.uint8).flatten(-2).unflatten(-1, (2, 4, 32))
    low = torch.stack((halves[..., 0, :] & 15 | halves[..., 2, :] << 4, halves[..., 1, :] & 15 | halves[..., 3, :] << 4), -2)
    bits = halves >> 4
    high = bits[..., 0, :] | bits[..., 1, :] << 2 | bits[..., 2, :] << 4 | bits[..., 3, :] << 6
    scales = small[..., 0].to(torch.int8).view(torch.uint8)
    return torch.cat((low.flatten(-3), high.flatten(-2), scales, head.view(torch.uint8)), -1)


ENCODERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "q4_0": partial(_symmetric, bits=4), "q4_1": partial(_affine, bits=4), "q5_0": partial(_symmetric, bits=5),
    "q5_1": partial(_affine, bits=5), "q8_0": _q8_0, "q4_k": _q4_k, "q6_k": _q6_k}
