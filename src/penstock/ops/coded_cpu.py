"""Products of quantized matrices on CPUs in integer arithmetic: packing for, and calls of, ops/csrc/coded.cpp.

x is rounded to int8 with a scale for each 32 columns (schemes that quantize activations themselves: for each row, or one that
they give), as llama.cpp does: results differ from the scheme's definition by that rounding, about 0.5 % of a product's standard
deviation. `--kernels linear.<scheme>=reference` computes with activations as they are instead, slowly."""

import mmap
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from penstock.ops import gguf_codes
from penstock.ops.bits import unpack
from penstock.ops.experts import ExpertsOps, Loose
from penstock.ops.linear import Weight

if TYPE_CHECKING:
    from penstock.ops.cpu import CpuOperations

_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_F32, _F32S, _F16, _F16S, _K45, _K6, _FP8 = range(7)
"""As csrc/coded.cpp."""
_PANEL, _BLOCK = 16, 32
Lie = tuple[int, int, int]
"""Of codes in rows: bytes of a block of 32 columns (of k-quants 256), where its codes begin, and csrc/coded.cpp's form."""
_SINGLE, _PAIRS = (32, 0, 0), (16, 0, 1)
_CALL = struct.Struct("16q")
_FP8_CODE, _FP8_PANEL = 3, 32
"""As csrc/dtypes.h and csrc/linear.cpp."""
_GROUPS = (32, 64, 128)
NAMES = (*gguf_codes.NAMES, "fp8", "fp8_block", "int8",
         *(f"int{bits}{group}" for bits in (2, 3, 4, 8) for group in ("row", *(f"g{size}" for size in _GROUPS))))
"""The schemes that are served, as `quant/` names them."""


class CodedPanels(Weight):
    """A matrix in panels: uint8 `scales` laid out by `kind` (csrc/coded.cpp, FP8: csrc/linear.cpp), numbers code - `offset`."""

    __slots__ = ("bits", "fixed", "gains", "group", "kind", "offset", "order", "scales", "tail")

    def __init__(self, data: torch.Tensor, n: int, k: int, dtype: torch.dtype, *, bits: int, kind: int, scales: torch.Tensor,
                 group: int, offset: int, gains: torch.Tensor | None = None, order: torch.Tensor | None = None,
                 fixed: torch.Tensor | None = None) -> None:
        """group: blocks of 32 columns that share a scale. fixed: how x is rounded if not by blocks: [1], the scale of all if it
        is positive, else a scale for each row."""
        super().__init__(data, n, k, dtype)
        self.bits, self.kind, self.scales, self.group, self.offset = bits, kind, scales, group, offset
        self.gains, self.order, self.fixed = gains, order, fixed
        self.nbytes += sum(one.nbytes for one in (scales, gains, order) if one is not None)
        self._point()

    def _point(self) -> None:
        at = [0 if one is None else one.data_ptr() for one in (self.data, self.scales, self.gains, self.fixed)]
        self.tail = (*at[:3], self.n, self.k, self.group, self.offset, self.bits, self.kind, at[3])

    def move(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().move(change)
        self._point()


class CodedPile(Loose):
    """Matrices in panels, all in one piece of memory: alone they are too small for huge pages. `data` [E, 16] has the arguments
    of csrc/coded.cpp for each, but for x, bias and results."""

    __slots__ = ()

    def __init__(self, each: Sequence[CodedPanels], dtype: torch.dtype, grouped: ExpertsOps) -> None:
        super().__init__(each, dtype, grouped)
        pages = mmap.mmap(-1, self.nbytes + 512 * self.count)  # each of a matrix's few tensors begins at a multiple of 64
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        memory, at = torch.frombuffer(pages, dtype=torch.uint8), 0

        def place(x: torch.Tensor) -> torch.Tensor:
            nonlocal at
            begin, at = at, at + -(-x.nbytes // 64) * 64
            return memory[begin:begin + x.nbytes].view(x.dtype).view(x.shape).copy_(x)

        self.move(place)

    def move(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().move(lambda x: x if x is self.data else change(x))
        self.data = torch.tensor([(0, 0, *one.tail, 0, 0, 0, 0) for one in self.each])  # type: ignore[attr-defined]


class CodedCpu:
    """LinearOps (ops/linear.py) of one library, for the schemes of `NAMES`."""

    def __init__(self, owner: "CpuOperations") -> None:
        self.owner = owner

    def pack(self, scheme: Any, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> CodedPanels:
        if scheme.name.startswith("fp8"):
            return self._fp8(scheme, parts, shape, dtype)
        codes, lie, bits, form = _taken(scheme, parts, shape[1])
        n, k = shape
        panels, blocks = -(-n // _PANEL), -(-k // _BLOCK)
        data = torch.empty(panels * blocks * _PANEL * _BLOCK * bits // 8, dtype=torch.uint8)
        codes = codes.contiguous()
        pack_codes = self.owner.lib.penstock_coded_pack
        form["offset"] += pack_codes(codes.data_ptr(), codes.shape[1], *lie, n, k, bits, data.data_ptr())
        return CodedPanels(data, n, k, dtype, bits=bits, **form)

    def _fp8(self, scheme: Any, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> CodedPanels:
        (n, k), lib, codes, scale = shape, self.owner.lib, parts["weight"].contiguous(), parts["scale"].float().view(1, -1)
        data = torch.empty(lib.penstock_packed_size(n, k, _FP8_CODE), dtype=torch.uint8)
        lib.penstock_pack(codes.data_ptr(), data.data_ptr(), n, k, k, 1, _FP8_CODE)
        if scheme.block is not None:
            tall, wide = scheme.block
            scale = parts["scale"].float().repeat_interleave(tall, 0)[:n].repeat_interleave(wide // 128, 1)[:, :-(-k // 128)].T
        lines = F.pad(scale, (0, -n % _FP8_PANEL)).unflatten(1, (-1, _FP8_PANEL)).transpose(0, 1).contiguous()
        span = {"none": 0, "token": k, "tensor": k, "group": 128}[scheme.activation]
        return CodedPanels(data, n, k, dtype, bits=8, kind=_FP8, scales=lines, group=len(scale), offset=span,
                           fixed=parts.get("input_scale"))

    def apply(self, x: torch.Tensor, weight: CodedPanels, bias: torch.Tensor | None = None,
              out_dtype: torch.dtype | None = None) -> torch.Tensor:
        if weight.order is not None:
            x = x.index_select(1, weight.order)
        dtype = x.dtype
        wide = out_dtype is not None and out_dtype is not dtype
        out = torch.empty(x.shape[0], weight.n, dtype=torch.float32 if wide else dtype)
        self.owner.lib.penstock_coded(_CALL.pack(
            x.data_ptr(), x.stride(0), *weight.tail, 0 if bias is None else bias.data_ptr(), out.data_ptr(), x.shape[0],
            _CODES[dtype] | wide << 8), 1)
        return out if not wide or out_dtype is torch.float32 else out.to(out_dtype)

    def gated(self, x: torch.Tensor, weight: CodedPanels, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
        return self.owner.gated(self.apply(x, weight, bias), kind)

    def gather(self, ids: torch.Tensor, weight: CodedPanels) -> torch.Tensor:
        ids = ids.to(torch.int64).contiguous()
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < weight.n:
            raise IndexError(f"an id is outside the {weight.n} rows of the weight")
        found = _values(ids, weight)
        if weight.gains is not None:
            found = found * weight.gains[ids, None]
        if weight.order is not None:
            found = torch.empty_like(found).index_copy_(1, weight.order, found)
        return found.to(weight.dtype)


def _values(ids: torch.Tensor, weight: CodedPanels) -> torch.Tensor:
    """The numbers [T, k] of rows `ids`."""
    rows, kind, panel, lane = len(ids), weight.kind, ids // _PANEL, ids % _PANEL
    if kind == _FP8:
        panel, lane = ids // _FP8_PANEL, ids % _FP8_PANEL
        found = weight.data.view(-1, weight.k, _FP8_PANEL)[panel, :, lane].view(torch.float8_e4m3fn).float()
        scale = weight.scales[panel, :, lane]
        return found * (scale if weight.group == 1 else scale.repeat_interleave(128, 1)[:, :weight.k])
    data = weight.data.view(torch.int8) if weight.bits == 8 and not weight.offset else weight.data
    lines = data.view(-1, -(-weight.k // _BLOCK), weight.bits, _PANEL, 4)[panel, :, :, lane]
    codes = lines if weight.bits == 8 else torch.stack((lines & 15, lines >> 4), 3)
    if weight.bits == 6:
        a, b, c = (three := lines.unflatten(2, (2, 3))).unbind(3)
        codes = torch.cat((three & 63, (a >> 6 << 4 | b >> 6 << 2 | c >> 6).unsqueeze(3)), 3)
    numbers = codes.flatten(1)[:, :weight.k].float() - weight.offset
    groups = -(-weight.k // (_BLOCK * weight.group))
    mine = weight.scales.view(-(-weight.n // _PANEL), groups, -1)[panel]  # [T, groups, bytes]

    def column(begin: int, kind: torch.dtype, lines: int) -> torch.Tensor:
        """`lines` consecutive numbers of each row and group, [T, groups, lines], as float32."""
        part = mine[..., begin:begin + lines * _PANEL * kind.itemsize].contiguous().view(kind).view(rows, groups, lines, _PANEL)
        return part.gather(3, lane.view(rows, 1, 1, 1).expand(rows, groups, lines, 1))[..., 0].float()

    size = weight.group * _BLOCK
    if kind in (_F32, _F32S, _F16, _F16S):
        pair = column(0, torch.float32 if kind in (_F32, _F32S) else torch.float16, 2 if kind in (_F32S, _F16S) else 1)
        shift = pair[..., 1:] if pair.shape[2] > 1 else None
        scale = pair[..., :1]
    elif kind == _K45:
        heads, small = column(0, torch.float16, 2), column(4 * _PANEL, torch.uint8, 16).view(rows, groups, 8, 2)
        scale, shift = heads[..., :1] * small[..., 0], -heads[..., 1:] * small[..., 1]
        size = _BLOCK
    else:
        scale, shift, size = column(0, torch.float16, 1) * column(2 * _PANEL, torch.int8, 16), None, _BLOCK // 2

    def spread(one: torch.Tensor) -> torch.Tensor:
        return one.reshape(rows, -1).repeat_interleave(size, 1)[:, :weight.k]

    found = numbers * spread(scale)
    return found if shift is None else found + spread(shift)


def _taken(scheme: Any, parts: Mapping[str, torch.Tensor], k: int) -> tuple[torch.Tensor, Lie, int, dict[str, Any]]:
    """Codes uint8 [n, bytes], how they lie there, their bits as they are packed, and the rest of CodedPanels."""
    name, data = scheme.name, parts["weight"]
    if name == "int8":
        fixed = {"none": None, "token": torch.zeros(1), "tensor": parts.get("input_scale")}[scheme.activation]
        return data.view(torch.uint8), _SINGLE, 8, _row(parts["scale"], k) | {"fixed": fixed}
    if name.startswith("q"):
        return _gguf(name, data)
    bits, size, scale, zero = scheme.bits, scheme.group or k, parts["scale"].float(), parts.get("zero")
    codes, lie = (data, _PAIRS) if bits == 4 else (unpack(data, bits), _SINGLE)
    middle = 1 << bits - 1
    order = parts["order"].long() if scheme.ordered else None
    if bits == 8:
        codes = codes ^ 128
    stored = 8 if bits == 8 else 4
    if zero is None:
        form = _row(scale, k) if not scheme.group else {"kind": _F32, "scales": _lines(scale), "group": size // _BLOCK}
        return codes, lie, stored, form | {"offset": 0 if bits == 8 else middle, "order": order}
    shift = ((128.0 if bits == 8 else 0.0) - zero.float()) * scale
    return codes, lie, stored, {"kind": _F32S, "scales": _lines(scale, shift), "group": -(-size // _BLOCK), "offset": 0,
                                "order": order}


def _row(scale: torch.Tensor, k: int) -> dict[str, Any]:
    """One scale for each row: factors of sums over all columns."""
    flat = scale.float().reshape(-1).contiguous()
    return {"kind": _F32, "scales": _lines(torch.ones(len(flat), 1)), "group": -(-k // _BLOCK), "offset": 0, "gains": flat}


def _gguf(name: str, data: torch.Tensor) -> tuple[torch.Tensor, Lie, int, dict[str, Any]]:
    """The same of GGUF's blocks."""
    (heads, small), lie = gguf_codes.numbers(name, data), (gguf_codes.BYTES[name][1], *gguf_codes.FORMS[name])
    bits = {"q8_0": 8, "q5_k": 6, "q6_k": 6}.get(name, 4)
    offset = gguf_codes.MIDDLES.get(name, 0)
    if small is None:
        return data, lie, bits, {"kind": _F16S if name == "q4_1" else _F16, "scales": _lines(*heads.unbind(-1)), "group": 1,
                                  "offset": offset}
    return data, lie, bits, {"kind": _K6 if name == "q6_k" else _K45, "scales": _bytes(heads.view(torch.uint8), small),
                              "group": 8, "offset": offset}


def _lines(*each: torch.Tensor) -> torch.Tensor:
    """Numbers of each row and group, [n, groups] each: by panels, [panel, group, which, row of the panel], as bytes."""
    both: torch.Tensor = torch.stack(each, -1)
    both = F.pad(both, (0, 0, 0, 0, 0, -len(both) % _PANEL))
    found: torch.Tensor = both.unflatten(0, (-1, _PANEL)).permute(0, 2, 3, 1).contiguous()
    return found.view(torch.uint8).flatten()


def _bytes(heads: torch.Tensor, small: torch.Tensor) -> torch.Tensor:
    """A k-quant's float16 numbers and its small ones, uint8 [n, superblocks, bytes] both, by panels: for each superblock each
    float16 of all rows, then each small number of all rows."""
    panels = [F.pad(one, (0, 0, 0, 0, 0, -len(one) % _PANEL)).unflatten(0, (-1, _PANEL)) for one in (heads, small)]
    first = panels[0].unflatten(-1, (-1, 2)).permute(0, 2, 3, 1, 4).flatten(2)
    second = panels[1].permute(0, 2, 3, 1).flatten(2)
    return torch.cat((first, second), -1).contiguous().flatten()
