"""The forms into which quantized matrices are packed for the GPU kernels of ops/coded_triton.py: which scheme becomes which."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from penstock.ops import gguf_codes, gpu
from penstock.ops.bits import unpack, with_bytes
from penstock.ops.linear import Weight

FP8 = torch.float8_e4m3fn
MOST = {FP8: 448.0, torch.int8: 127.0}
"""The largest magnitude of an activation's code."""

GROUPS = (32, 64, 128)
NAMES = ("fp8", "fp8_block", "int8", "mxfp4", "mxfp8", "nvfp4", "nf4", "fp4", *gguf_codes.NAMES,
         *(f"int{bits}{group}" for bits in (2, 3, 4, 8) for group in ("row", *(f"g{size}" for size in GROUPS))))
"""The schemes that are served, as `quant/` names them."""


class CodedWeight(Weight):
    """A matrix as the kernels read it. Columns are taken in units of 128 (or 64), each of which has 1, 2 or 4 scales a row.

    kind: what `data` holds
        int4, e2m1, table4   16-bit words of 4-bit codes, [panel of 64 rows, unit, row, unit / 4]: word j of a unit has columns
                             j, j + unit / 4, j + unit / 2 and j + 3 unit / 4, the first in its lowest bits. They stand
                             for themselves less a zero, for the numbers of FP4 E2M1, and for those of `table`,
                             as ops/bits.py::with_bytes has them
        number               int8 or FP8 codes [n, padded], which are converted to x's type
        plain                the same, with x quantized to the same type
    form: what `words` [lines a unit, one after another; rows] hold
        row                  nothing
        float                float32 scales, a line each
        pairs, halves        16-bit scales, two to a line: those of two units, or two of the same unit
        zeros, shifts        a 16-bit scale and a zero (subtracted before the scale) or a shift (added after it), a line each
    gains [n] are factors of whole rows. blocks: float32 scales of blocks of 128 x 128 once more, as the library takes them.
    scaled: x has no scales, one a row ("token"), or one a unit ("group")."""

    __slots__ = ("blocks", "form", "gains", "input_scale", "kind", "order", "padded", "scale", "scaled", "scales", "spread",
                 "table", "unit", "words")

    def __init__(self, data: torch.Tensor, n: int, k: int, dtype: torch.dtype, *, kind: str, form: str = "row", unit: int = 128,
                 scales: int = 1, words: torch.Tensor | None = None, scale: torch.dtype = torch.float16,
                 gains: torch.Tensor | None = None, table: torch.Tensor | None = None, order: torch.Tensor | None = None,
                 scaled: str = "none", input_scale: torch.Tensor | None = None, blocks: torch.Tensor | None = None) -> None:
        super().__init__(data, n, k, dtype)
        self.kind, self.form, self.unit, self.scales, self.words, self.scale = kind, form, unit, scales, words, scale
        self.gains, self.table, self.order, self.scaled, self.input_scale = gains, table, order, scaled, input_scale
        self.blocks = blocks
        self.padded = -(-k // 256) * 256 if self.four else data.shape[1]
        self.spread = 0 if words is None else words.shape[1]
        self.nbytes += sum(part.nbytes for part in (words, gains, table, order, blocks) if part is not None)

    @property
    def half(self) -> bool:
        """Whether 16-bit scales are float16; else they are bfloat16."""
        return self.scale is torch.float16

    @property
    def span(self) -> int:
        """Columns of an activation that share a scale."""
        return self.unit if self.scaled == "group" else self.k

    @property
    def four(self) -> bool:
        return self.kind in ("int4", "e2m1", "table4")


def attached(out: torch.Tensor, reader: Weight | None) -> tuple[Any, Any, Any, int, float]:
    """Room for the codes of activations `out` [rows, k], as the product with `reader` takes them: (codes, scales, fixed scale,
    columns of a scale as a power of two, the largest code), which the kernel that writes `out` writes too. They stay with `out`
    itself: no view of it has them. (None, None, None, 0, 0) where that product does not take codes."""
    if not isinstance(reader, CodedWeight) or reader.scaled == "none" or reader.k != reader.padded or reader.order is not None:
        return None, None, None, 0, 0.0
    assert out.shape[1] == reader.k
    codes, scales = empty_codes(out.shape[0], reader)
    setattr(out, _CODES, (reader, codes, scales))
    return codes, scales, reader.input_scale, gpu.covering(reader.span), MOST[reader.data.dtype]


def codes_of(x: torch.Tensor, reader: CodedWeight) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The codes and scales that came with x for this reader, or None."""
    found = getattr(x, _CODES, None)
    return found[1:] if found is not None and found[0] is reader else None


def empty_codes(rows: int, reader: CodedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [rows, k] of activations, of the type of the matrix's, and scales [spans, rows]."""
    device = reader.data.device
    return (torch.empty(rows, reader.k, dtype=reader.data.dtype, device=device),
            torch.empty(reader.padded // reader.span if reader.scaled == "group" else 1, rows, device=device))


_CODES = "penstock_codes"


def coded(scheme: Any, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> CodedWeight:
    """The matrix of `shape`, whose scheme has a name of `NAMES` and these parts, for activations of `dtype`."""
    (n, k), name, weight = shape, scheme.name, parts["weight"]
    if name in ("fp8", "int8", "fp8_block"):
        scaled = {"none": "none", "token": "token", "tensor": "token", "group": "group"}[scheme.activation]
        common: dict[str, Any] = {"kind": "number" if scaled == "none" else "plain", "scaled": scaled,
                                  "input_scale": parts.get("input_scale")}
        if name != "fp8_block":
            return CodedWeight(_wide(weight), n, k, dtype, gains=parts["scale"].float().contiguous(), **common)
        tall, size = scheme.block
        scale = parts["scale"].float().repeat_interleave(tall, 0)[:n]
        if scaled == "group" and (tall, size) == (128, 128) and n % 128 == k % 128 == 0:
            common["blocks"] = parts["scale"].float().contiguous()
        return CodedWeight(_wide(weight), n, k, dtype, form="float", words=_floats(_units(scale, size, k, 128)), **common)
    if name in ("mxfp4", "mxfp8"):
        scale = torch.exp2(parts["scale"].float() - 127).to(torch.bfloat16)
        if name == "mxfp8":
            data = _wide(weight)
            scale = _units(scale, 32, k, 32, data.shape[1])
            return CodedWeight(data, n, k, dtype, kind="number", form="pairs", unit=32, scale=torch.bfloat16,
                               words=_pairs(scale))
        words = _pairs(_units(scale, 32, k, 32))
        return _four(weight, n, k, dtype, "e2m1", 128, form="halves", scales=4, scale=torch.bfloat16, words=words)
    if name == "nvfp4":
        whole = parts["global_scale"].float()
        words = _pairs(_units(parts["scale"].to(torch.float16), 16, k, 16))
        return _four(weight, n, k, dtype, "e2m1", 64, form="halves", scales=4, words=words,
                     gains=1 / whole if scheme.divides else whole.contiguous())
    if name in ("nf4", "fp4"):
        codes = torch.arange(16, dtype=torch.uint8, device=weight.device)
        table = scheme.decode({"weight": codes[0::2] | codes[1::2] << 4,
                               "absmax": torch.ones(1, device=weight.device)}, torch.float32)
        table, size = with_bytes(table.flatten(), dtype), min(scheme.block, 128)
        words = _floats(_units(parts["absmax"].float(), scheme.block, k, size))
        return _four(weight, n, k, dtype, "table4", 128, form="float", scales=128 // size, words=words, table=table)
    if name in gguf_codes.NAMES:
        return _gguf(name, weight, n, k, dtype)
    return _grouped(scheme, parts, n, k, dtype)


def _gguf(name: str, data: torch.Tensor, n: int, k: int, dtype: torch.dtype) -> CodedWeight:
    """Rows of GGUF's blocks. Scales of superblocks are products, rounded to float16 relative to their row's largest."""
    codes, (heads, small) = gguf_codes.codes(name, data), gguf_codes.numbers(name, data)
    scale, shift = gguf_codes.scales(name, heads, small)
    four = name.startswith("q4")
    size = 16 if name == "q6_k" else 32
    columns = -(-k // 256) * 256 if four else -(-k // 128) * 128
    gains = None
    if small is not None:
        peak = torch.maximum(scale.abs(), torch.zeros_like(scale) if shift is None else shift.abs() / 64).amax(1)
        gains = torch.exp2(torch.floor(torch.log2(peak.clamp_min(2.0**-100))))
        scale, shift = scale / gains[:, None], None if shift is None else shift / gains[:, None]
    wide = _units(scale, size, k, size, columns)
    if shift is not None:
        second = _units(shift, size, k, size, columns).to(torch.float16)
        form: dict[str, Any] = {"form": "shifts", "words": _words(wide.to(torch.float16), second)}
    else:
        form = {"form": "halves" if four else "pairs", "words": _pairs(wide.to(torch.float16))}
    if four:
        return _four(codes[:, 0::2] | codes[:, 1::2] << 4, n, k, dtype, "int4", 128, scales=4, gains=gains, **form)
    numbers = codes.view(torch.int8) - 32 if name == "q6_k" else codes.view(torch.int8)
    return CodedWeight(_wide(numbers), n, k, dtype, kind="number", unit=size, gains=gains, **form)


def joined(each: Sequence[CodedWeight]) -> CodedWeight:
    """Matrices of one scheme and equal columns as one, by rows. All but the last have whole panels; the first rounds x."""
    first = each[0]
    words, gains = (None if getattr(first, name) is None else torch.cat([getattr(one, name) for one in each], axis)
                    for name, axis in (("words", 1), ("gains", 0)))
    data = torch.cat([one.data.view(torch.int8) for one in each]).view(first.data.dtype)
    return CodedWeight(data, sum(one.n for one in each), first.k, first.dtype, kind=first.kind, form=first.form,
                       unit=first.unit, scales=first.scales, words=words, scale=first.scale, gains=gains, table=first.table,
                       order=first.order, scaled=first.scaled, input_scale=first.input_scale)


def _grouped(scheme: Any, parts: Mapping[str, torch.Tensor], n: int, k: int, dtype: torch.dtype) -> CodedWeight:
    """Integers of 2 to 8 bits with scales of groups, and perhaps zeros and an order of columns."""
    bits, scale, zero = scheme.bits, parts["scale"], parts.get("zero")
    order = parts["order"].to(torch.int64) if scheme.ordered else None
    size, data = min(scheme.group or 128, 128), parts["weight"]
    if bits in (2, 3):
        data = unpack(data, bits)
        if zero is None:
            data = data + (8 - (1 << bits - 1))
        data = data[:, 0::2] | data[:, 1::2] << 4
    columns = -(-k // 256) * 256 if bits < 8 else -(-k // 128) * 128
    if zero is None and not scheme.group:
        form: dict[str, Any] = {"gains": scale.float().view(n).contiguous()}
    elif zero is None:
        scale = _units(scale, scheme.group, k, size, columns)
        if scale.dtype is torch.float32:
            form = {"form": "float", "words": _floats(scale)}
        else:
            form = {"form": "pairs" if bits == 8 or size == 128 else "halves", "words": _pairs(scale), "scale": scale.dtype}
    else:
        kind = scale.dtype if scale.dtype is not torch.float32 else torch.float16
        wide, zeros = (_units(one.float(), scheme.group or k, k, size, columns) for one in (scale, zero))
        if zero.dtype is torch.uint8:
            second = zeros - (128.0 if bits == 8 else 0.0)
        else:
            second = -zeros * wide if bits < 8 else (128.0 - zeros) * wide
        form = {"form": "zeros" if zero.dtype is torch.uint8 else "shifts", "words": _words(wide.to(kind), second.to(kind)),
                "scale": kind}
    if bits < 8:
        return _four(data, n, k, dtype, "int4", 128, order=order, scales=128 // size, **form)
    return CodedWeight(_wide((data ^ 128).view(torch.int8)), n, k, dtype, kind="number", unit=size, order=order, **form)


def _four(data: torch.Tensor, n: int, k: int, dtype: torch.dtype, kind: str, unit: int, **form: Any) -> CodedWeight:
    """4-bit codes [n, k / 2], low half first, in panels."""
    columns, rows = -(-k // 256) * 256, -(-n // 128) * 128
    codes = F.pad(torch.stack((data & 15, data >> 4), -1).flatten(1), (0, columns - k, 0, rows - n))
    codes = codes.view(rows // 64, 64, columns // unit, 4, unit // 4).transpose(1, 2)
    low, high = (codes[..., i, :] | codes[..., i + 1, :] << 4 for i in (0, 2))
    packed = torch.stack((low, high), -1).view(torch.int16)[..., 0].view(torch.uint16)
    return CodedWeight(packed.reshape(rows, columns // 4), n, k, dtype, kind=kind, unit=unit, **form)


def _wide(codes: torch.Tensor) -> torch.Tensor:
    """8-bit codes [n, k], with zeros up to a multiple of 128 columns."""
    missing = -codes.shape[1] % 128
    return (F.pad(codes.view(torch.int8), (0, missing)).view(codes.dtype) if missing else codes).contiguous()


def _units(scale: torch.Tensor, group: int, k: int, unit: int, columns: int = 0) -> torch.Tensor:
    """The scales of groups as those of units, which divide groups: [n, units], zeros where there are no columns."""
    if group >= k:
        group = -(-k // unit) * unit
    units = -(-k // unit)
    found = scale.repeat_interleave(group // unit, 1)[:, :units] if group > unit else scale
    return F.pad(found, (0, (columns or -(-k // 256) * 256) // unit - units))


def _floats(scale: torch.Tensor) -> torch.Tensor:
    return scale.T.contiguous().view(torch.int32)


def _pairs(scale: torch.Tensor) -> torch.Tensor:
    """16-bit scales [n, groups], two to a word."""
    scale = F.pad(scale, (0, scale.shape[1] % 2))
    return _words(scale[:, 0::2], scale[:, 1::2])


def _words(lower: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
    """16-bit numbers [n, words], transposed."""
    return torch.stack((lower.T, upper.T), -1).contiguous().view(torch.int32)[..., 0]
