"""The operations on CPUs: thin wrappers of the C++ kernels in ops/csrc, one set per instruction set.

The environment variable PENSTOCK_CPU_ISA (amx, avx512, avx2, portable) restricts the choice to one of them. The references'
docstrings are the contracts. Every layer of every step calls these wrappers, so they check little and allocate once."""

import os
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.core.errors import ConfigError
from penstock.ops import coded_cpu, native
from penstock.ops.attention import AttentionOps, Span, Tree
from penstock.ops.codec import Scales, table
from penstock.ops.experts import ExpertsOps, Glu, Loose, Stack
from penstock.ops.linear import Weight
from penstock.ops.lora import MOST_PIECES, Groups, LoraOps, Slabs
from penstock.ops.sample import SampleOps
from penstock.ops.table import register
from penstock.platform.facts import DeviceFacts

_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""As csrc/dtypes.h."""

_KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4, "quick_gelu": 5}
"""As csrc/rows.cpp."""

STORED, _CODED = 1, 2
"""As csrc/experts.cpp."""


class PackedWeight(Weight):
    """A weight in panels (csrc/linear.cpp), with the pointer and type code that every call needs."""

    __slots__ = ("code", "pointer")

    def __init__(self, data: torch.Tensor, n: int, k: int, dtype: torch.dtype) -> None:
        super().__init__(data, n, k, dtype)
        self.code = _CODES[dtype]
        self.pointer = data.data_ptr()

    def move(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().move(change)
        self.pointer = self.data.data_ptr()


class _Owned:
    def __init__(self, owner: "CpuOperations") -> None:
        self._owner = owner


class CpuLinear(_Owned):
    """LinearOps (ops/linear.py) of one library."""

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        lib = self._owner.lib
        n, k = weight.shape
        code = _CODES[weight.dtype]
        data = torch.empty(lib.penstock_packed_size(n, k, code), dtype=weight.dtype)
        lib.penstock_pack(weight.data_ptr(), data.data_ptr(), n, k, weight.stride(0), weight.stride(1), code)
        return PackedWeight(data, n, k, weight.dtype)

    def apply(self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None,
              out_dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = x.dtype
        assert dtype is weight.dtype and x.shape[1] == weight.k, "x has the weight's dtype and width"
        rows, n = x.shape[0], weight.n
        narrow = out_dtype is None or out_dtype is dtype
        out = torch.empty(rows, n, dtype=dtype if narrow else torch.float32)
        self._owner.lib.penstock_linear(
            x.data_ptr(), x.stride(0), weight.pointer, None if bias is None else bias.data_ptr(), out.data_ptr(), rows, n,
            weight.k, weight.code, not narrow)
        return out if narrow or out_dtype is torch.float32 else out.to(out_dtype)

    def gated(self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
        return self._owner.gated(self.apply(x, weight, bias), kind)

    def gather(self, ids: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        ids = ids.to(torch.int64).contiguous()
        out = torch.empty((ids.shape[0], weight.k), dtype=weight.dtype)
        bad = self._owner.lib.penstock_gather(ids.data_ptr(), ids.shape[0], weight.pointer, weight.n, weight.k, out.data_ptr(),
                                              weight.code)
        if bad >= 0:
            raise IndexError(f"id {int(ids[bad])} is outside the {weight.n} rows of the weight")
        return out


class CpuHeadLinear(_Owned):
    """HeadLinearOps (ops/latent.py) of one library: a product a head, so that a row's bits do not depend on the others."""

    def pack(self, weight: torch.Tensor) -> list[PackedWeight]:
        return [self._owner.linear.pack(one.t()) for one in weight]

    def apply(self, x: torch.Tensor, weight: list[PackedWeight], out: torch.Tensor) -> None:
        for head, one in enumerate(weight):
            out[:, head] = self._owner.linear.apply(x[:, head], one)


class CpuExperts(_Owned, ExpertsOps):
    """The operation `experts` of one library: only picked experts are read, and a token's bits depend on itself alone."""

    _ARGUMENTS = struct.Struct("17q3dq")

    @property
    def run(self) -> Any:
        return self._owner.lib.penstock_experts

    def told(self, x: torch.Tensor, picks: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, up: torch.Tensor,
             down: torch.Tensor, glu: Glu, up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, inward: bool, *,
             inner: int = 0, form: int = 0) -> bytes:
        """The arguments of csrc/experts.cpp: sizes, and addresses of memory that must live as long as they are used. `form`:
        how matrices lie; `STORED`: [E, n, k], n is a multiple of 16, and `out` float32. `inner`: F, else."""
        return self._ARGUMENTS.pack(
            x.data_ptr(), x.stride(0), picks.data_ptr(), weights.data_ptr(), up.data_ptr(), down.data_ptr(),
            0 if up_bias is None else up_bias.data_ptr(), 0 if down_bias is None else down_bias.data_ptr(), out.data_ptr(),
            *picks.shape, len(up), x.shape[1], inner or down.shape[2], _KINDS[glu.kind], inward, form, glu.alpha, glu.limit,
            glu.shift, _CODES[x.dtype])

    def pack(self, matrices: torch.Tensor) -> Stack:
        lib = self._owner.lib
        count, n, k = matrices.shape
        code = _CODES[matrices.dtype]
        data = torch.empty(count, lib.penstock_packed_size(n, k, code), dtype=matrices.dtype)
        for packed, matrix in zip(data, matrices, strict=True):
            lib.penstock_pack(matrix.data_ptr(), packed.data_ptr(), n, k, matrix.stride(0), matrix.stride(1), code)
        return Stack(data, count, n, k, matrices.dtype, self)

    def pack_each(self, each: Sequence[Weight], dtype: torch.dtype) -> Stack:
        mine = [one for one in each if isinstance(one, coded_cpu.CodedPanels) and one.order is None
                and isinstance(one.ops, coded_cpu.CodedCpu) and one.ops.owner is self._owner]
        return coded_cpu.CodedPile(mine, dtype, self) if len(mine) == len(each) else super().pack_each(each, dtype)

    def product(self, x: torch.Tensor, stack: Stack, expert: int, bias: torch.Tensor | None) -> torch.Tensor:
        if isinstance(stack, Loose):
            return super().product(x, stack, expert, bias)
        return self._owner.linear.apply(x, PackedWeight(stack.data[expert], stack.n, stack.k, stack.dtype), bias)

    def apply(self, x: torch.Tensor, picks: torch.Tensor, weights: torch.Tensor, up: Stack, down: Stack, glu: Glu,
              up_bias: torch.Tensor | None = None, down_bias: torch.Tensor | None = None, inward: bool = False,
              shared: tuple[Weight, Weight] | None = None, whole: bool = True) -> torch.Tensor:
        kinds = {type(up), type(down)}
        if kinds not in ({Stack}, {coded_cpu.CodedPile}):
            return super().apply(x, picks, weights, up, down, glu, up_bias, down_bias, inward, shared, whole)
        assert x.dtype is up.dtype and x.stride(1) == 1 and picks.is_contiguous() and weights.is_contiguous()
        out, how = torch.empty(x.shape, dtype=x.dtype), {"inner": down.k, "form": _CODED if coded_cpu.CodedPile in kinds else 0}
        self.run(self.told(x, picks, weights, out, up.data, down.data, glu, up_bias, down_bias, inward, **how))
        return out


class CpuLora(_Owned, LoraOps):
    """The operation `lora` of one library: both products of a row at once."""

    _CALL, _PROJECTION = struct.Struct("10q"), struct.Struct("16q")

    def shrink(self, x: torch.Tensor, path: str, slabs: Slabs, groups: Groups) -> torch.Tensor:  # noqa: ARG002
        return x

    def expand(self, low: torch.Tensor, path: str, slabs: Slabs, groups: Groups, out: torch.Tensor,
               bias: torch.Tensor | None) -> None:
        known, (number, tiles, order, *_) = low.dim() > 2, groups
        self._owner.lib.penstock_lora(self._CALL.pack(
            low.data_ptr(), low.stride(1 if known else 0), known, number.data_ptr(), tiles.data_ptr(), order.data_ptr(),
            out.data_ptr(), out.stride(0), 0 if bias is None else bias.data_ptr(), tiles.stride(0))
            + (slabs.packed.get(path) or self._projection(path, slabs)),
            _CODES[slabs.data.dtype], out.dtype is not slabs.data.dtype)

    def _projection(self, path: str, slabs: Slabs) -> bytes:
        target, data, gains, facts = slabs.layout.targets[path], slabs.data, slabs.gains, slabs.facts
        slabs.packed[path] = found = self._PROJECTION.pack(
            data.data_ptr(), gains.data_ptr(), facts.data_ptr(), data.stride(0), gains.stride(0), facts.stride(0),
            len(target.pieces), *(*target.pieces, 0, 0, 0)[:MOST_PIECES], target.inputs, target.down, target.up, target.gains,
            target.facts)
        return found


class CpuAttention(_Owned, AttentionOps):
    """AttentionOps of one library. Threads divide the work themselves, so nothing is prepared on the host."""

    def apply(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor,
              query_start: torch.Tensor, context: torch.Tensor, scale: float, window: int = 0, softcap: float = 0.0,
              sinks: torch.Tensor | None = None, work: torch.Tensor | None = None,  # noqa: ARG002 (nothing is prepared)
              library: Sequence[Span] = (), slopes: torch.Tensor | None = None,  # noqa: ARG002
              scales: Scales | None = None, tree: Tree | None = None) -> torch.Tensor:
        tokens, heads, size = q.shape
        value_size = v_cache.shape[3] if scales is None else size
        out = torch.empty(tokens, heads, value_size, dtype=q.dtype)
        kc, vc, shape = k_cache.stride(), v_cache.stride(), k_cache.shape
        self._owner.lib.penstock_attention(self._owner.ATTENTION.pack(
            q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), table.data_ptr(), query_start.data_ptr(),
            context.data_ptr(), out.data_ptr(), q.stride(0), q.stride(1), *kc[:3], *vc[:3], table.stride(0),
            query_start.shape[0] - 1, heads, shape[1], size, value_size, shape[2], window,
            0 if sinks is None else sinks.data_ptr(), 0 if slopes is None else slopes.data_ptr(),
            *((0, 0) if tree is None else (tree.origin.data_ptr(), tree.bits.data_ptr())), *_codings(scales)),
            scale, softcap, _CODES[q.dtype], _CODES[k_cache.dtype] if scales is None else 3)
        return out


    def whole(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, query_start: torch.Tensor, scale: float, window: int = 0,
              slopes: torch.Tensor | None = None) -> torch.Tensor:
        # Pages of one token each, and no table of them.
        return self.apply(q, k[:, :, None], v[:, :, None], _NONE, query_start, _NONE, scale, window, slopes=slopes)


_NONE = torch.empty(0, 0, dtype=torch.int32)
"""Its address is null."""
_PLAIN = (0,) * 14 * 2
_ELEMENTS = {"float8_e4m3fn": 0, "float8_e5m2": 1, "int8": 2, "uint8": 3}
_RULES = {"fixed": 0, "peak": 1, "signed": 2, "range": 3, "norm": 4}
_SCALES = {"float32": 0, "float16": 1, "float8_e4m3fn": 2}
"""As csrc/codec.h."""


def _codings(scales: Scales | None) -> tuple[float, ...]:
    """Two times the fields of csrc/codec.h's Coding: of keys and of values."""
    if scales is None:
        return _PLAIN
    codec, found = scales.codec, list[float]()
    for coding, beside, fixed in ((codec.key, scales.k, codec.scales[0]), (codec.value, scales.v, codec.scales[1])):
        found += (0, 0, 0, 0) if beside is None else (beside.data_ptr(), *beside.stride()[:3])
        found += (table(coding, _CPU).data_ptr() if coding.magnitudes else 0, coding.bits, coding.group,
                  _ELEMENTS[coding.dtype], _RULES[coding.rule], coding.gguf, _SCALES[coding.scales], fixed,
                  coding.peak, coding.least)
    return tuple(found)


_CPU = torch.device("cpu")


class CpuSample(_Owned, SampleOps):
    """SampleOps of one library: masks are its own, all else is the reference."""

    def mask(self, logits: torch.Tensor, bits: torch.Tensor, lines: torch.Tensor) -> None:
        self._owner.lib.penstock_mask(logits.data_ptr(), logits.stride(0), logits.shape[1], bits.contiguous().data_ptr(),
                                      bits.shape[1], lines.data_ptr(), len(lines))


class CpuOperations:
    """The operations of one instruction set. `supports` builds and loads the library, and must be called first."""

    _ROPE = struct.Struct("31q")
    ATTENTION = struct.Struct("27q11q3d11q3d")
    _CACHE = struct.Struct("19q11q3d11q3d")

    def __init__(self, isa: native.InstructionSet) -> None:
        self.isa = isa
        self.linear = CpuLinear(self)
        self.head_linear = CpuHeadLinear(self)
        self.attention = CpuAttention(self)
        self.experts = CpuExperts(self)
        self.lora = CpuLora(self)
        self.sample = CpuSample(self)

    def supports(self, facts: DeviceFacts, _dtype: torch.dtype) -> str | None:
        wanted = os.environ.get("PENSTOCK_CPU_ISA")
        if wanted and wanted not in (names := [isa.name for isa in native.INSTRUCTION_SETS]):
            raise ConfigError(f"PENSTOCK_CPU_ISA is {wanted!r}; possible are {', '.join(names)}, or leave it unset")
        if facts.kind != "cpu":
            return "it runs on CPUs"
        if wanted and wanted != self.isa.name:
            return f"PENSTOCK_CPU_ISA asks for {wanted}"
        if missing := self.isa.needs - facts.flags:
            return f"this CPU has no {', '.join(sorted(missing))}"
        try:
            self.lib = native.library(self.isa.name)
        except native.BuildError as error:
            return str(error)
        return None

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0,
                 reader: Weight | None = None) -> torch.Tensor:  # noqa: ARG002
        shape = x.shape
        if x.dim() > 3:
            x = x.flatten(0, -2).contiguous()
        out = torch.empty(shape, dtype=x.dtype)
        dims = x.dim()
        outer, outer_stride = (x.shape[0], x.stride(0)) if dims > 1 else (1, 0)
        inner, inner_stride = (x.shape[1], x.stride(1)) if dims > 2 else (1, 0)
        self.lib.penstock_rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), outer, inner, outer_stride, inner_stride,
                                   shape[-1], eps, offset, _CODES[x.dtype], _CODES[weight.dtype])
        return out

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float,
                     offset: float = 0.0, reader: Weight | None = None) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002
        rows, width = x.shape
        out = torch.empty(rows, width, dtype=x.dtype)
        self.lib.penstock_add_rms_norm(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, x.stride(0),
                                       residual.stride(0), width, eps, offset, _CODES[x.dtype], _CODES[weight.dtype])
        return out, residual

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        rows, width = x.shape
        out = torch.empty(rows, width, dtype=x.dtype)
        self.lib.penstock_layer_norm(
            x.data_ptr(), None if weight is None else weight.data_ptr(), None if bias is None else bias.data_ptr(),
            out.data_ptr(), rows, x.stride(0), width, eps, _CODES[x.dtype], _CODES[x.dtype if weight is None else weight.dtype])
        return out

    def rope_write(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, positions: torch.Tensor,
                   slots: torch.Tensor | None, k_cache: torch.Tensor, v_cache: torch.Tensor | None,
                   cos: torch.Tensor | None = None, sin: torch.Tensor | None = None, q_norm: torch.Tensor | None = None,
                   k_norm: torch.Tensor | None = None, eps: float = 1e-6, offset: float = 0.0,
                   interleaved: bool = False) -> torch.Tensor:
        dtype = q.dtype
        assert k_cache.dtype is dtype and (k_norm is None or k_norm.dtype is dtype), "the cache and the norms have q's dtype"
        tokens, heads, size = q.shape
        out = torch.empty(tokens, heads, size, dtype=dtype)
        qs, ks, kc = q.stride(), k.stride(), k_cache.stride()
        vs, vc = (ks, kc) if v is None or v_cache is None else (v.stride(), v_cache.stride())
        half = 0 if cos is None else cos.shape[1]
        self.lib.penstock_rope_write(self._ROPE.pack(
            q.data_ptr(), k.data_ptr(), 0 if v is None else v.data_ptr(), qs[0], qs[1], ks[0], ks[1], vs[0], vs[1],
            positions.data_ptr(), 0 if slots is None else slots.data_ptr(), k_cache.data_ptr(),
            0 if v_cache is None else v_cache.data_ptr(), *kc[:3], *vc[:3],
            0 if cos is None else cos.data_ptr(), 0 if sin is None else sin.data_ptr(),
            0 if q_norm is None else q_norm.data_ptr(), 0 if k_norm is None else k_norm.data_ptr(), out.data_ptr(),
            tokens, heads, k.shape[1], size, k_cache.shape[2], half, interleaved), eps, offset, _CODES[q.dtype])
        return out

    def cache_write(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                    scales: Scales) -> None:
        ks, vs, kc, vc = k.stride(), v.stride(), k_cache.stride(), v_cache.stride()
        self.lib.penstock_cache_write(self._CACHE.pack(
            k.data_ptr(), v.data_ptr(), *ks[:2], *vs[:2], slots.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), *kc[:3],
            *vc[:3], *k.shape, k_cache.shape[2], *_codings(scales)), _CODES[k.dtype])

    def activation(self, x: torch.Tensor, kind: str, gated: int = 0) -> torch.Tensor:
        rows, width = x.shape
        width >>= gated
        out = torch.empty(rows, width, dtype=x.dtype)
        self.lib.penstock_activation(x.data_ptr(), x.stride(0), out.data_ptr(), rows, width, _KINDS[kind], gated,
                                     _CODES[x.dtype])
        return out

    def gated(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        return self.activation(x, kind, 1)


def _register() -> None:
    for isa in native.INSTRUCTION_SETS:
        operations = CpuOperations(isa)
        calls: dict[str, Any] = {op: getattr(operations, op) for op in (
            "linear", "head_linear", "rms_norm", "add_rms_norm", "layer_norm", "rope_write", "cache_write", "attention",
            "experts", "lora", "gated", "activation", "sample")}
        calls |= {f"linear.{scheme}": coded_cpu.CodedCpu(operations) for scheme in coded_cpu.NAMES}
        for op, call in calls.items():
            register(op, f"cpu-{isa.name}", rank=isa.rank, supports=operations.supports, dtypes=tuple(_CODES))(call)


_register()

set_threads = native.set_threads
"""For ops/registry.py: how many threads the kernels may use."""
