"""Codecs of the KV cache: how many bits the numbers of a key or a value take in a page, and the operation that writes them.

A codec is an entry of `CODECS`. Its `Coding` of keys and of values says all that kernels, memory plan and identity need;
`encode` and `decode` here are its definition, and the oracle of the kernels. Kernels read codes in their inner loop: a scale of
a whole head's vector is applied to the score (keys) or to the weight (values), never to the vector."""

from dataclasses import dataclass, field
from functools import cache
from typing import Literal, NamedTuple

import torch

from penstock.core.state import Field
from penstock.ops.bits import FP4, pack, unpack
from penstock.ops.table import register

NORMAL16 = (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326)
NORMAL8 = (0.2451, 0.7560, 1.3439, 2.1520)
"""Magnitudes of the quantizers of 16 and of 8 levels with the least mean squared error for N(0, 1) (Max 1960, table I)."""

Rule = Literal["fixed", "peak", "signed", "range", "norm"]


@dataclass(frozen=True)
class Coding:
    """A vector [D] of one head: number = value(code) * scale + shift, for each `group` of elements.

    4 bits: a byte has element j in its low half, j + D / 2 in its high one. 3 bits: 8 elements in 3 bytes, lowest first."""

    dtype: str
    """A torch name. uint8: packed codes of `bits`."""
    rule: Rule
    """The way to a group's scale. fixed: it is the layer's, and not stored. peak: the largest magnitude gets the largest
    code. signed: the same for a largest number of either sign (GGUF's Q4_0). range: scale and shift span the least to the
    largest number. norm: the vector keeps its length (TurboQuant)."""
    bits: int = 8
    group: int = 0
    """Elements that share a scale; 0: the whole vector."""
    scales: str = "float32"
    """The scales' type, a torch name."""
    magnitudes: tuple[float, ...] = ()
    """Values of codes without their highest bit, which is the sign; none: codes are numbers, less 8 under the rule `signed`."""
    gguf: bool = False
    """Codes are found by the scale before it is rounded, and halves are rounded away from zero, as llama.cpp does."""
    rotated: bool = False
    """Vectors are rotated by a Hadamard matrix before they are encoded. Scores do not change if queries are rotated, too."""

    @property
    def peak(self) -> float:
        """The largest value of a code."""
        if self.magnitudes:
            return self.magnitudes[-1]
        return {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}.get(self.dtype, 2.0**self.bits - 1)

    @property
    def least(self) -> float:
        """The smallest scale."""
        return {"float32": 1e-12, "float16": 2.0**-24, "float8_e4m3fn": 2.0**-9}[self.scales]

    def nbytes(self, size: int) -> int:
        """Codes' bytes of a vector of `size` elements."""
        return size * self.bits // 8

    def numbers(self, size: int) -> int:
        """The number of scales, and of shifts behind them, of a vector."""
        if self.rule == "fixed":
            return 0
        return (size // self.group if self.group else 1) * (2 if self.rule == "range" else 1)

    @property
    def form(self) -> int:
        """A kernel's decoding as bits: 0-4 `bits`; 5 a table; 6 a shift; 7 codes less 8; 8 stored scales; 9 and up `group`."""
        return (self.bits | bool(self.magnitudes) << 5 | (self.rule == "range") << 6 | (self.rule == "signed") << 7
                | (self.rule != "fixed") << 8 | self.group << 9)

    def encode(self, x: torch.Tensor, fixed: float = 1.0) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [..., D] as codes [..., bytes] and scales [..., numbers]; `fixed` is the layer's scale."""
        groups = x.float().unflatten(-1, (-1, self.group or x.shape[-1]))
        kind, shift = getattr(torch, self.scales), None
        if self.rule == "fixed":
            return self._codes(groups / fixed).flatten(-2).to(getattr(torch, self.dtype)), None
        top = groups.abs().amax(-1, keepdim=True)
        if self.rule == "range":
            shift = groups.amin(-1, keepdim=True).to(kind)
            groups = groups - shift.float()
            top = groups.amax(-1, keepdim=True)
        elif self.rule == "signed":
            top = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) * -self.peak / 8
        elif self.rule == "norm":
            top = groups.pow(2).mean(-1, keepdim=True).sqrt() * self.peak
        scale = (top / self.peak).to(kind) if self.gguf else (top / self.peak).clamp_min(self.least).to(kind)
        exact = top / self.peak if self.gguf else scale.float()
        inverse = torch.where(exact == 0, 0.0, 1 / exact)
        codes = self._codes(groups * inverse)
        if self.rule == "norm":
            length = self._values(codes).pow(2).sum(-1, keepdim=True).sqrt()
            scale = (groups.pow(2).sum(-1, keepdim=True).sqrt() / length).to(kind)
        found = torch.cat((scale, shift), -1) if shift is not None else scale
        return self._packed(codes.flatten(-2)), found.flatten(-2)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor | None, fixed: float = 1.0) -> torch.Tensor:
        """The numbers [..., D], float32."""
        values = self._values(torch.cat((codes & 15, codes >> 4), -1) if self.bits == 4 else unpack(codes, self.bits))
        if scales is None:
            return values * fixed
        each = 2 if self.rule == "range" else 1
        given = scales.float().unflatten(-1, (-1, each))
        groups: torch.Tensor = values.unflatten(-1, (given.shape[-2], -1)) * given[..., :1]
        return (groups + given[..., 1:] if each == 2 else groups).flatten(-2)

    def _codes(self, x: torch.Tensor) -> torch.Tensor:
        """Numbers in units of the scale as codes: of floating point dtypes the values, else integers."""
        if self.dtype.startswith("float"):
            return x.clamp(-self.peak, self.peak).to(getattr(torch, self.dtype))
        if self.magnitudes:
            middles = torch.tensor([(a + b) / 2 for a, b in zip(self.magnitudes, self.magnitudes[1:], strict=False)],
                                   device=x.device)
            # Of two equally near values that with the even code.
            odd = torch.arange(len(middles), device=x.device) % 2 == 1
            size = x.abs()[..., None]
            code = ((size > middles) | odd & (size == middles)).sum(-1)
            return (code + (x < 0) * len(self.magnitudes)).to(torch.uint8)
        if self.rule == "signed":
            return torch.trunc(x + 8.5).clamp(0, self.peak).to(torch.uint8)
        found = torch.sign(x) * torch.floor(x.abs() + 0.5) if self.gguf else torch.round(x)
        return found.clamp(0 if self.dtype == "uint8" else -self.peak, self.peak).to(getattr(torch, self.dtype))

    def _values(self, codes: torch.Tensor) -> torch.Tensor:
        if self.magnitudes:
            return table(self, codes.device)[codes.long()]
        return codes.float() - 8 if self.rule == "signed" else codes.float()

    def _packed(self, codes: torch.Tensor) -> torch.Tensor:
        if self.bits != 4:
            return pack(codes, self.bits)
        low, high = codes.chunk(2, -1)
        return low | high << 4

    def misfit(self, size: int) -> str | None:
        """Why vectors of `size` elements cannot be stored so; None if they can."""
        if self.rotated and size & (size - 1):
            return f"it rotates heads, whose size {size} is not a power of two"
        unit = max(self.group, {8: 1, 4: 2, 3: 8}[self.bits])
        return f"it stores {unit} elements together, and heads have {size}" if size % unit else None


@dataclass(frozen=True)
class Codec:
    """Both codings of a layer's cache."""

    name: str
    key: Coding
    value: Coding
    scales: tuple[float, float] = field(default=(1.0, 1.0), compare=False)
    """The layer's scales of keys and values under the rule `fixed`. Layers that differ in them alone run the same kernels."""

    def fields(self, heads: int, size: int) -> tuple[Field, ...]:
        """Of a state with that many KV heads: k and v hold codes, k_scale and v_scale what is stored beside them."""
        found = []
        for name, coding in (("k", self.key), ("v", self.value)):
            found.append(Field(name, (heads, coding.nbytes(size)), coding.dtype))
            if coding.numbers(size):
                found.append(Field(f"{name}_scale", (heads, coding.numbers(size)), coding.scales))
        return tuple(found)


@cache
def table(coding: Coding, device: torch.device) -> torch.Tensor:
    """Values by code, float32."""
    return torch.tensor([*coding.magnitudes, *(-value for value in coding.magnitudes)], device=device)


def sylvester(size: int) -> torch.Tensor:
    """A symmetric matrix [size, size] of 1 and -1 with orthogonal rows (Sylvester's construction); size: a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def hadamard(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric matrices [size, size] for queries and for keys, whose product is the identity. Their elements are powers of
    two, exact in any dtype; both are orthogonal but for a factor."""
    matrix, power = sylvester(size), size.bit_length() - 1
    return matrix * 2.0**-(power // 2), matrix * 2.0**-(power - power // 2)


class Scales(NamedTuple):
    """The numbers beside a cache's codes."""

    codec: Codec
    k: torch.Tensor | None
    """[pages, KV, page, numbers], strided; None if the scale is fixed."""
    v: torch.Tensor | None


@register("cache_write", "reference", rank=0, capturable=False)
def cache_write(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                scales: Scales) -> None:
    """Encodes k and v [T, KV, D], whose last dimension is contiguous, into their slots [T] int64 (page id x page size + offset;
    -1 for padding, which is not written). k_cache, v_cache [pages, KV, page, bytes] hold the codes, `scales` the rest."""
    page, kept = k_cache.shape[2], slots >= 0
    at, inside = slots[kept] // page, slots[kept] % page
    codec = scales.codec
    for x, coding, codes, beside, fixed in ((k, codec.key, k_cache, scales.k, codec.scales[0]),
                                            (v, codec.value, v_cache, scales.v, codec.scales[1])):
        found, numbers = coding.encode(x[kept], fixed)
        _raw(codes)[at, :, inside] = _raw(found.contiguous())
        if beside is not None and numbers is not None:
            _raw(beside)[at, :, inside] = _raw(numbers.contiguous())


def _raw(x: torch.Tensor) -> torch.Tensor:
    """Types of one byte as uint8: not every device assigns FP8 by index."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _both(name: str, coding: Coding) -> Codec:
    return Codec(name, coding, coding)


_FOUR, _THREE = Coding("uint8", "range", 4, 0, "float16"), Coding("uint8", "range", 3, 0, "float16")

CODECS = {codec.name: codec for codec in (
    _both("fp8", Coding("float8_e4m3fn", "fixed")),
    _both("fp8_e5m2", Coding("float8_e5m2", "fixed")),
    _both("fp8_per_token_head", Coding("float8_e4m3fn", "peak")),
    _both("int8", Coding("int8", "peak")),
    _both("int4", _FOUR),
    _both("nvfp4", Coding("uint8", "peak", 4, 16, "float8_e4m3fn", FP4[:8])),
    Codec("turbo4", Coding("uint8", "norm", 4, 0, "float16", NORMAL16, rotated=True), _FOUR),
    Codec("turbo3", Coding("uint8", "norm", 3, 0, "float16", NORMAL8, rotated=True), _THREE),
    _both("q8_0", Coding("int8", "peak", 8, 32, "float16", gguf=True)),
    _both("q4_0", Coding("uint8", "signed", 4, 32, "float16", gguf=True)))}


@cache
def aged(size: int) -> Coding:
    """The storage of vectors of `size` elements behind the device under kv_cache_dtype aged: 4 bits by groups of 32."""
    return Coding("uint8", "range", 4, 32 if size % 32 == 0 else 0, "float16")
