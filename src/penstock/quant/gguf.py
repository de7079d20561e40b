"""The block types of GGUF files. A matrix stays as the file has it, in rows of blocks, decoded by vectorised arithmetic on
bytes. Layouts: ggml (github.com/ggml-org/ggml, MIT), `ggml-common.h`; results equal those of its `gguf` package bit for bit,
so the order of float operations is part of it. The grids of the IQ types, `iq_grids.bin`, are ggml's tables (MIT), codes packed
lowest bits first.

Numbers become blocks here, too: the types of 32 columns are rounded to nearest as ggml's reference quantizers do it; Q4_K and
Q6_K by the range of each group, without ggml's search for better scales."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch

from penstock.core.errors import ModelError
from penstock.ops import gguf_codes
from penstock.ops.bits import table, unpack
from penstock.quant.scheme import Part, Weights

IQ4 = (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0)
"""IQ4_NL's values by code."""
_FP4 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0)
"""Twice E2M1's."""


class Kind(NamedTuple):
    """A block type: its columns and bytes, and `decode`, uint8 [..., nbytes] -> float32 [..., columns]."""

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
    return (_groups(values, width)[..., None, :] >> by & mask).flatten(-3)


_NIBBLES = (0, 4)
_PAIRS = (0, 2, 4, 6)


def _five(block: torch.Tensor, at: int) -> torch.Tensor:
    """32 codes of 5 bits: the high bits of all, then the nibbles."""
    high = _fields(block[..., at:at + 4], range(8), 1)
    return (_fields(block[..., at + 4:], _NIBBLES, 15, 16) | high << 4).float()


def _groups(values: torch.Tensor, size: int) -> torch.Tensor:
    return values.reshape(*values.shape[:-1], values.shape[-1] // size, size)


def _coded(name: str, block: torch.Tensor) -> torch.Tensor:
    """Of a type that `ops/gguf_codes.py` takes apart."""
    rows = block.reshape(-1, block.shape[-1])
    codes, (heads, small) = gguf_codes.codes(name, rows), gguf_codes.numbers(name, rows)
    scale, shift = gguf_codes.scales(name, heads, small)
    numbers = codes.view(torch.int8).float() if name == "q8_0" else codes.float() - gguf_codes.MIDDLES.get(name, 0)
    found = scale[..., None] * _groups(numbers, numbers.shape[-1] // scale.shape[-1])
    return (found if shift is None else found + shift[..., None]).reshape(*block.shape[:-1], -1)


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
    return _groups(_fields(bits, range(8), 1), 8).float().mul_(-2).add_(1)


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
    **{name: Kind(256 if name.endswith("_k") else 32, nbytes, partial(_coded, name))
       for name, (_, nbytes) in gguf_codes.BYTES.items()},
    "q5_0": Kind(32, 22, lambda block: _half(block, 0) * (_five(block, 2) - 16)),
    "q5_1": Kind(32, 24, lambda block: _half(block, 0) * _five(block, 4) + _half(block, 2)),
    "q2_k": Kind(256, 84, _q2_k), "q3_k": Kind(256, 110, _q3_k), "iq1_s": Kind(256, 50, _iq1_s), "iq1_m": Kind(256, 56, _iq1_m),
    "iq2_xxs": Kind(256, 66, _iq2_xxs), "iq2_xs": Kind(256, 74, _iq2_xs), "iq2_s": Kind(256, 82, _iq2_s),
    "iq3_xxs": Kind(256, 98, _iq3_xxs), "iq3_s": Kind(256, 110, _iq3_s), "iq4_nl": Kind(32, 18, _iq4_nl),
    "iq4_xs": Kind(256, 136, _iq4_xs), "tq1_0": Kind(256, 54, _tq1_0), "tq2_0": Kind(256, 66, _tq2_0),
    "mxfp4": Kind(32, 17, _mxfp4), "nvfp4": Kind(64, 36, _nvfp4)}
"""Every type of blocks by its name in lower case."""


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


@dataclass(frozen=True)
class GGUF(Weights):
    """`name` is a type's name in lower case, as q4_k."""

    name: str

    @property
    def grain(self) -> tuple[int, int]:
        return 1, KINDS[self.name].columns

    def parts(self, n: int, k: int, _dtype: str) -> tuple[Part, ...]:
        return (Part("weight", (n, self.row_bytes(k)), "uint8"),)

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of k columns; ModelError if they are no whole blocks."""
        kind = KINDS[self.name]
        if k % kind.columns:
            raise ModelError(f"rows of {k} columns cannot be stored as {self.name}, whose blocks have {kind.columns}")
        return k // kind.columns * kind.nbytes

    def encode(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        self.row_bytes(matrix.shape[-1])
        if self.name not in ENCODERS:
            raise ModelError(f"weights cannot be quantized to {self.name} here; possible GGUF types are {', '.join(ENCODERS)}")
        blocks = matrix.float().unflatten(-1, (-1, KINDS[self.name].columns)).contiguous()
        return {"weight": ENCODERS[self.name](blocks).flatten(-2)}

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        kind = KINDS[self.name]
        return kind.decode(parts["weight"].unflatten(-1, (-1, kind.nbytes))).flatten(-2).to(dtype)
