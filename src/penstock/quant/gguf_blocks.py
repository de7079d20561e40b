"""Decodes the blocks of GGUF's types, by vectorised arithmetic on bytes. Layouts: ggml (github.com/ggml-org/ggml, MIT),
`ggml-common.h`; results equal those of its `gguf` package bit for bit, so the order of float operations is part of it.

The grids of the IQ types, `iq_grids.bin`, are ggml's tables (MIT), codes packed lowest bits first."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from penstock.ops import gguf_codes
from penstock.ops.bits import table, unpack

IQ4 = (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0)
"""IQ4_NL's values by code."""
_FP4 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0)
"""Twice E2M1's."""


class Kind(NamedTuple):
    """A block type: its columns and bytes, and `decode`, uint8 [..., nbytes] -> float32 [..., columns]."""

    number: int
    """In files."""
    columns: int
    nbytes: int
    decode: Callable[[torch.Tensor], torch.Tensor]


def _half(block: torch.Tensor, at: int) -> torch.Tensor:
    return block[..., at:at + 2].contiguous().view(torch.float16).float()


def _words(block: torch.Tensor, first: int, last: int, size: int) -> torch.Tensor:
    """Little-endian unsigned numbers of 2 or 4 bytes, as int32 bits."""
    words = block[..., first:last].contiguous()
    return words.view(torch.int16).to(torch.int32) & 0xFFFF if size == 2 else words.view(torch.int32)


def _fields(values: torch.Tensor, shifts: range | tuple[int, ...], mask: int, width: int = 1) -> torch.Tensor:
    """Of each run of `width` values the field at the first shift, then at the second ...: [..., m] -> [..., m * shifts]."""
    by = torch.tensor(tuple(shifts), dtype=values.dtype, device=values.device)[:, None]
    found: torch.Tensor = ((values.unflatten(-1, (-1, 1, width)) >> by) & mask).flatten(-3)
    return found


_NIBBLES = (0, 4)
_PAIRS = (0, 2, 4, 6)


def _five(block: torch.Tensor, at: int) -> torch.Tensor:
    """32 codes of 5 bits: the high bits of all, then the nibbles."""
    high = _fields(block[..., at:at + 4], range(8), 1)
    return (_fields(block[..., at + 4:], _NIBBLES, 15, 16) | high << 4).float()


def _groups(values: torch.Tensor, size: int) -> torch.Tensor:
    found: torch.Tensor = values.unflatten(-1, (-1, size))
    return found


def _coded(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Of a type that `ops/gguf_codes.py` takes apart."""
    def decode(block: torch.Tensor) -> torch.Tensor:
        rows = block.reshape(-1, block.shape[-1])
        codes, (heads, small) = gguf_codes.codes(name, rows), gguf_codes.numbers(name, rows)
        scale, shift = gguf_codes.scales(name, heads, small)
        numbers = codes.view(torch.int8).float() if name == "q8_0" else codes.float() - gguf_codes.MIDDLES.get(name, 0)
        found = scale[..., None] * _groups(numbers, numbers.shape[-1] // scale.shape[-1])
        return (found if shift is None else found + shift[..., None]).reshape(*block.shape[:-1], -1)

    return decode


def _q2_k(block: torch.Tensor) -> torch.Tensor:
    scales = block[..., :16]
    scale, low = _half(block, 80) * (scales & 15).float(), _half(block, 82) * (scales >> 4).float()
    codes = _groups(_fields(block[..., 16:80], _PAIRS, 3, 32).float(), 16)
    return (scale[..., None] * codes - low[..., None]).flatten(-2)


def _q3_k(block: torch.Tensor) -> torch.Tensor:
    packed = block[..., 96:108]
    scales = _fields(packed[..., :8], _NIBBLES, 15, 8) | _fields(packed[..., 8:], _PAIRS, 3, 4) << 4
    scale = _half(block, 108) * (scales.float() - 32)
    # A set bit of the mask means that nothing is subtracted.
    high = _fields(block[..., :32], range(8), 1, 32) ^ 1
    codes = _fields(block[..., 32:96], _PAIRS, 3, 32).float() - (high << 2).float()
    return (scale[..., None] * _groups(codes, 16)).flatten(-2)


def _iq4_nl(block: torch.Tensor) -> torch.Tensor:
    return _half(block, 0) * table(IQ4, block.device)[_fields(block[..., 2:], _NIBBLES, 15, 16).long()]


def _iq4_xs(block: torch.Tensor) -> torch.Tensor:
    low, high = _fields(block[..., 4:8], _NIBBLES, 15), _fields(_words(block, 2, 4, 2), range(0, 16, 2), 3)
    scale = _half(block, 0) * ((low | high << 4).float() - 32)
    values = table(IQ4, block.device)[_fields(block[..., 8:], _NIBBLES, 15, 16).long()]
    return (scale[..., None] * _groups(values, 32)).flatten(-2)


def _tq1_0(block: torch.Tensor) -> torch.Tensor:
    found = []
    for first, last, width, powers in ((0, 32, 32, 5), (32, 48, 16, 5), (48, 52, 4, 4)):
        factors = torch.tensor([3**i for i in range(powers)], dtype=torch.int32, device=block.device)[:, None]
        # Ternary digits of a fraction: multiplied by a power of 3 modulo 256, the next digit is in front.
        found.append((block[..., first:last].int().unflatten(-1, (-1, 1, width)) * factors & 255).flatten(-3))
    return _half(block, 52) * ((torch.cat(found, -1) * 3 >> 8).float() - 1)


def _tq2_0(block: torch.Tensor) -> torch.Tensor:
    return _half(block, 64) * (_fields(block[..., :64], _PAIRS, 3, 32).float() - 1)


def _mxfp4(block: torch.Tensor) -> torch.Tensor:
    code = block[..., :1].to(torch.int32)
    # Half of the power of two, for the table has twice the values.
    scale = torch.where(code < 2, 0x00200000 << code.clamp_max(1), code - 1 << 23).view(torch.float32)
    return scale * table(_FP4, block.device)[_fields(block[..., 1:], _NIBBLES, 15, 16).long()]


def _nvfp4(block: torch.Tensor) -> torch.Tensor:
    scales = block[..., :4].contiguous()
    scale = torch.where(scales & 127 == 127, 0, scales & 127).view(torch.float8_e4m3fn).float() * 0.5
    values = table(_FP4, block.device)[_fields(block[..., 4:], _NIBBLES, 15, 8).long()]
    return (scale[..., None] * _groups(values, 16)).flatten(-2)


_GRIDS = {"iq1": (2048, 8, (-1.0, 0.0, 1.0)), "iq2_xxs": (256, 8, (8.0, 25.0, 43.0)), "iq2_xs": (512, 8, (8.0, 25.0, 43.0)),
          "iq2_s": (1024, 8, (8.0, 25.0, 43.0)), "iq3_xxs": (256, 4, (4.0, 12.0, 20.0, 28.0, 36.0, 44.0, 52.0, 62.0)),
          "iq3_s": (512, 4, (1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0))}
"""Entries, values of each, and values by code, in the order in which the file has them."""


@cache
def _grid(name: str, device: torch.device) -> torch.Tensor:
    """The vectors of a grid, float32 [entries, values]."""
    data, at = (Path(__file__).parent / "iq_grids.bin").read_bytes(), 0
    for one, (entries, size, values) in _GRIDS.items():
        bits = 2 if len(values) <= 4 else 4
        nbytes = entries * size * bits // 8
        if one == name:
            codes = unpack(torch.frombuffer(bytearray(data[at:at + nbytes]), dtype=torch.uint8), bits)
            return torch.tensor(values)[codes.long()].view(entries, size).to(device)
        at += nbytes
    raise KeyError(name)


def _signs(bits: torch.Tensor) -> torch.Tensor:
    """1 or -1 for each bit of the bytes [..., m]: [..., m, 8]."""
    found: torch.Tensor = 1 - 2 * _fields(bits, range(8), 1).float().unflatten(-1, (-1, 8))
    return found


def _even_signs(codes: torch.Tensor) -> torch.Tensor:
    """The same for codes of 7 bits, whose eighth makes the number of -1 even."""
    folded = codes ^ codes >> 4
    folded = folded ^ folded >> 2
    return _signs(codes | (folded ^ folded >> 1) << 7 & 128)


def _looked_up(name: str, codes: torch.Tensor, signs: torch.Tensor, scale: torch.Tensor, size: int) -> torch.Tensor:
    """Grid vectors times their signs and the scales of runs of `size` columns."""
    values = (scale[..., None] * _groups(_grid(name, codes.device)[codes.long()].flatten(-2), size)).flatten(-2)
    return values * signs.flatten(-2)


def _iq2_xxs(block: torch.Tensor) -> torch.Tensor:
    words = _words(block, 2, 66, 4).unflatten(-1, (-1, 2))
    codes, rest = words[..., 0], words[..., 1]
    scale = _half(block, 0) * (0.5 + (rest >> 28 & 15).float()) * 0.25
    signs = _even_signs(_fields(rest, (0, 7, 14, 21), 127))
    return _looked_up("iq2_xxs", _fields(codes, (0, 8, 16, 24), 255), signs, scale, 32)


def _iq2_xs(block: torch.Tensor) -> torch.Tensor:
    words = _words(block, 2, 66, 2)
    scale = _half(block, 0) * (0.5 + _fields(block[..., 66:], _NIBBLES, 15).float()) * 0.25
    return _looked_up("iq2_xs", words & 511, _even_signs(words >> 9), scale, 16)


def _iq2_s(block: torch.Tensor) -> torch.Tensor:
    codes = block[..., 2:34].int() | _fields(block[..., 66:74], _PAIRS, 3).int() << 8
    scale = _half(block, 0) * (0.5 + _fields(block[..., 74:], _NIBBLES, 15).float()) * 0.25
    return _looked_up("iq2_s", codes, _signs(block[..., 34:66]), scale, 16)


def _iq3_xxs(block: torch.Tensor) -> torch.Tensor:
    rest = _words(block, 66, 98, 4)
    scale = _half(block, 0) * (0.5 + (rest >> 28 & 15).float()) * 0.5
    return _looked_up("iq3_xxs", block[..., 2:66], _even_signs(_fields(rest, (0, 7, 14, 21), 127)), scale, 32)


def _iq3_s(block: torch.Tensor) -> torch.Tensor:
    codes = block[..., 2:66].int() | _fields(block[..., 66:74], range(8), 1).int() << 8
    scale = _half(block, 0) * (1 + 2 * _fields(block[..., 106:], _NIBBLES, 15)).float()
    return _looked_up("iq3_s", codes, _signs(block[..., 74:106]), scale, 32)


def _shifted(codes: torch.Tensor, negative: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """IQ1's grid vectors, moved by an eighth up or down. All are per run of 8 columns."""
    delta = 0.125 - 0.25 * negative.float()
    return (scale[..., None] * (_grid("iq1", codes.device)[codes.long()] + delta[..., None])).flatten(-2)


def _iq1_s(block: torch.Tensor) -> torch.Tensor:
    words = _words(block, 34, 50, 2)
    scale = _half(block, 0) * (2 * (words >> 12 & 7) + 1).float()
    codes = block[..., 2:34].int() | _fields(words, (0, 3, 6, 9), 7) << 8
    return _shifted(codes, (words >> 15).repeat_interleave(4, -1), scale.repeat_interleave(4, -1))


def _iq1_m(block: torch.Tensor) -> torch.Tensor:
    words = _words(block, 48, 56, 2)
    bits = (words & 0xF000) >> torch.tensor((12, 8, 4, 0), dtype=torch.int32, device=block.device)
    whole = bits.sum(-1, keepdim=True).to(torch.int16).view(torch.float16).float()
    scale = whole * (2 * _fields(words, (0, 3, 6, 9), 7) + 1).float()
    high = _fields(block[..., 32:48], _NIBBLES, 15)
    return _shifted(block[..., :32].int() | (high & 7).int() << 8, high >> 3, scale.repeat_interleave(2, -1))


KINDS = {
    "f32": Kind(0, 1, 4, lambda block: block.contiguous().view(torch.float32)),
    "f16": Kind(1, 1, 2, lambda block: block.contiguous().view(torch.float16).float()),
    "bf16": Kind(30, 1, 2, lambda block: block.contiguous().view(torch.bfloat16).float()),
    "q4_0": Kind(2, 32, 18, _coded("q4_0")), "q4_1": Kind(3, 32, 20, _coded("q4_1")),
    "q5_0": Kind(6, 32, 22, lambda block: _half(block, 0) * (_five(block, 2) - 16)),
    "q5_1": Kind(7, 32, 24, lambda block: _half(block, 0) * _five(block, 4) + _half(block, 2)),
    "q8_0": Kind(8, 32, 34, _coded("q8_0")), "q2_k": Kind(10, 256, 84, _q2_k), "q3_k": Kind(11, 256, 110, _q3_k),
    "q4_k": Kind(12, 256, 144, _coded("q4_k")), "q5_k": Kind(13, 256, 176, _coded("q5_k")),
    "q6_k": Kind(14, 256, 210, _coded("q6_k")),
    "iq2_xxs": Kind(16, 256, 66, _iq2_xxs), "iq2_xs": Kind(17, 256, 74, _iq2_xs), "iq3_xxs": Kind(18, 256, 98, _iq3_xxs),
    "iq1_s": Kind(19, 256, 50, _iq1_s), "iq4_nl": Kind(20, 32, 18, _iq4_nl), "iq3_s": Kind(21, 256, 110, _iq3_s),
    "iq2_s": Kind(22, 256, 82, _iq2_s), "iq4_xs": Kind(23, 256, 136, _iq4_xs), "iq1_m": Kind(29, 256, 56, _iq1_m),
    "tq1_0": Kind(34, 256, 54, _tq1_0), "tq2_0": Kind(35, 256, 66, _tq2_0), "mxfp4": Kind(39, 32, 17, _mxfp4),
    "nvfp4": Kind(40, 64, 36, _nvfp4)}
"""Every type by its name in lower case."""
