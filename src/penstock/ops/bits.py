"""Codes of few bits in bytes, and small floating point formats as tables. Layouts of other programs are turned into these."""

from functools import cache
from itertools import pairwise

import torch

from penstock.ops import native

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""E2M1 by code (OCP Microscaling Formats 1.0, table 5)."""


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes uint8 [..., k], 8 | k, of 2, 3, 4 or 8 bits as a stream of bits a row, lowest first: uint8 [..., k * bits / 8]."""
    if bits == 8:
        return codes.contiguous()
    if bits == 4:
        return (codes[..., ::2] | codes[..., 1::2] << 4).contiguous()
    whole = (codes.to(torch.int32).unflatten(-1, (-1, 8)) << (bits * _range(8, codes.device))).sum(-1)
    found: torch.Tensor = (whole[..., None] >> (8 * _range(bits, codes.device)) & 255).to(torch.uint8).flatten(-2)
    return found


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes, uint8 [..., k], of what `pack` gives."""
    if bits == 8:
        return packed
    if bits == 4:
        return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    groups = packed.to(torch.int32).unflatten(-1, (-1, bits))
    whole = (groups << (8 * _range(bits, packed.device))).sum(-1)
    found: torch.Tensor = (whole[..., None] >> (bits * _range(8, packed.device)) & (1 << bits) - 1).to(torch.uint8).flatten(-2)
    return found


def turned(words: torch.Tensor) -> torch.Tensor:
    """AWQ's words, int32 [k, n / 8] of eight rows' codes, even ones first, as codes uint8 [n, k / 2] like `pack`'s."""
    (k, wide), lib = words.shape, native.loaded() if words.device.type == "cpu" else None
    if lib is not None and k % 128 == wide % 16 == 0:
        out, words = torch.empty(8 * wide, k // 2, dtype=torch.uint8), words.contiguous()
        lib.penstock_coded_turn(words.data_ptr(), k, wide, out.data_ptr())
        return out
    pairs = words.t().contiguous().view(torch.int64)
    found = torch.empty(wide, 8, k // 2, dtype=torch.uint8, device=words.device)
    for i in range(8):
        both = pairs >> 4 * (i // 2 + i % 2 * 4) & 0x0000000F_0000000F
        found[:, i] = both | both >> 28
    return found.flatten(0, 1)


def _range(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)


@cache
def table(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Values by code as float32, made once a device."""
    return torch.tensor(values, dtype=torch.float32, device=device)


def with_bytes(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """16 values, float32, and behind them the bits of 8 words: the low bytes of the values in `dtype`, of 16 bits, then their
    high ones. Kernels look codes up in these by permuting bytes."""
    halves = values.to(torch.float16 if dtype is torch.float32 else dtype).view(torch.uint8)
    return torch.cat((values, halves.view(16, 2).t().contiguous().view(torch.float32).flatten()))


def nearest(x: torch.Tensor, values: tuple[float, ...]) -> torch.Tensor:
    """The code, uint8, of the value next to each x; of two equally near ones the code that is even."""
    order = sorted(range(len(values)), key=lambda code: (values[code], -code))
    order = [code for at, code in enumerate(order) if not at or values[code] != values[order[at - 1]]]
    ascending = [values[code] for code in order]
    middle = torch.tensor([(a + b) / 2 for a, b in pairwise(ascending)], device=x.device)
    upper = torch.searchsorted(middle, x.float().contiguous(), right=True)
    lower = torch.searchsorted(middle, x.float().contiguous())
    codes = torch.tensor(order, dtype=torch.uint8, device=x.device)
    high, low = codes[upper], codes[lower]
    return torch.where(high & 1 == 0, high, low)


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """E8M0 codes, uint8, as float32: 2^(code - 127); 255 is not a number (OCP Microscaling Formats 1.0, 5.4.1)."""
    codes = exponents.to(torch.int32)
    bits = torch.where(codes == 0, 0x00400000, codes << 23)
    return torch.where(codes == 255, 0x7FC00000, bits).view(torch.float32)


def blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    """x [..., k] as [..., k / size, size], zeros behind a short last block."""
    rest = -x.shape[-1] % size
    found: torch.Tensor = (torch.nn.functional.pad(x, (0, rest)) if rest else x).unflatten(-1, (-1, size))
    return found


def spread(scales: torch.Tensor, size: int, k: int) -> torch.Tensor:
    """Values per block [..., blocks] as one per column [..., k]."""
    if scales.shape[-1] * size == k:
        return scales[..., None].expand(*scales.shape, size).flatten(-2)
    return scales.repeat_interleave(size, -1)[..., :k]
