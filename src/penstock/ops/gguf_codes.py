"""GGUF's block types whose numbers are code * scale + shift, taken apart for the kernels of CPUs and GPUs.

ggml-common.h has their layout. `quant/gguf.py` defines what all block types mean."""

import torch

NAMES = ("q8_0", "q4_0", "q4_1", "q4_k", "q5_k", "q6_k")
BYTES = {"q8_0": (2, 34), "q4_0": (2, 18), "q4_1": (4, 20), "q4_k": (4, 144), "q5_k": (4, 176), "q6_k": (2, 210)}
"""Of a block's float16 numbers, and of a block."""
FORMS = {"q8_0": (2, 0), "q4_0": (2, 2), "q4_1": (4, 2), "q4_k": (16, 3), "q5_k": (48, 4), "q6_k": (0, 5)}
"""Where codes begin in a block, and how they lie there (csrc/coded.cpp)."""
MIDDLES = {"q4_0": 8, "q6_k": 32}
"""Codes that stand for 0, where 0 does not."""


def codes(name: str, data: torch.Tensor) -> torch.Tensor:
    """The codes, uint8 [n, k], of rows of blocks."""
    begin, nbytes = BYTES[name]
    block = data.unflatten(-1, (-1, nbytes))
    if name == "q8_0":
        plain: torch.Tensor = block[..., begin:].flatten(1)
        return plain
    if name in ("q4_0", "q4_1"):
        return torch.cat((block[..., begin:] & 15, block[..., begin:] >> 4), -1).flatten(1)
    if name == "q6_k":
        low, high = block[..., :128].unflatten(-1, (2, 1, 64)), block[..., 128:192].unflatten(-1, (2, 1, 32))
        found = torch.cat((low & 15, low >> 4), -2).flatten(-3) | (_shifted(high, (0, 2, 4, 6)) & 3).flatten(-3) << 4
        return found.flatten(1)
    pairs = block[..., 48 if name == "q5_k" else 16:].unflatten(-1, (4, 1, 32))
    found = torch.cat((pairs & 15, pairs >> 4), -2).flatten(-3)
    if name == "q5_k":
        found = found | (_shifted(block[..., None, 16:48], tuple(range(8))) & 1).flatten(-2) << 4
    return found.flatten(1)


def numbers(name: str, data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(a block's float16 numbers [n, blocks, 1 or 2], the small numbers of a superblock uint8 [n, superblocks, 16]) of rows of
    blocks: of q6_k 16 signed scales, of q4_k and q5_k eight pairs of scale and minimum."""
    begin, nbytes = BYTES[name]
    block = data.unflatten(-1, (-1, nbytes))
    heads = block[..., 208:210] if name == "q6_k" else block[..., :begin]
    heads = heads.contiguous().view(torch.float16)
    if name == "q6_k":
        return heads, block[..., 192:208]
    if nbytes < 144:
        return heads, None
    a, b, c = (block[..., 4 + 4 * i:8 + 4 * i] for i in range(3))
    scale = torch.cat((a & 63, c & 15 | a >> 6 << 4), -1)
    least = torch.cat((b & 63, c >> 4 | b >> 6 << 4), -1)
    return heads, torch.stack((scale, least), -1).flatten(-2)


def scales(name: str, heads: torch.Tensor, small: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """float32 (scales, shifts) [n, groups of 32, q6_k 16]: number = (code - middle) * scale + shift; q8_0's are signed."""
    wide = heads.float()
    if small is None:
        return wide[..., 0], wide[..., 1] if name == "q4_1" else None
    if name == "q6_k":
        return (wide * small.contiguous().view(torch.int8).float()).flatten(1), None
    pair = small.float().unflatten(-1, (8, 2))
    return (wide[..., :1] * pair[..., 0]).flatten(1), (-wide[..., 1:] * pair[..., 1]).flatten(1)


def _shifted(values: torch.Tensor, shifts: tuple[int, ...]) -> torch.Tensor:
    """values [..., 1, m] at each shift: [..., shifts, m]."""
    found: torch.Tensor = values >> torch.tensor(shifts, dtype=torch.uint8, device=values.device)[:, None]
    return found
