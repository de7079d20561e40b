"""torchao as transformers writes it to safetensors files: a matrix's codes, scales and zero points as `MODULE._weight_NAME`.

Its packings for single GPU kernels (tiles, preshuffled words) and its prototypes are refused by name."""

import re
from collections.abc import Mapping
from typing import Any

import torch

from penstock.core.errors import ModelError
from penstock.ops.bits import pack, unpack
from penstock.quant.dialects.compressed_tensors import signed
from penstock.quant.form import FLOATS, Form, Given, Reader, Tensors, by_row, named, outside_linears, setting, whole
from penstock.quant.fp8 import FP8
from penstock.quant.integer import Grouped, Int8
from penstock.quant.scheme import Activation

_NAMES = _CODES, _SCALE, _ZERO = "._weight_qdata", "._weight_scale", "._weight_zero_point"
_KINDS = ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig",
          "Float8DynamicActivationFloat8WeightConfig", "Int4WeightOnlyConfig", "IntxWeightOnlyConfig",
          "Int8DynamicActivationIntxWeightConfig")


def _plain_int4(n: int, k: int, group: int) -> Form:
    """Two signed codes a byte, low half first; a number is code * scale + zero. Scales and zeros are [groups, n]."""

    def parts(raw: Tensors) -> dict[str, torch.Tensor]:
        scale, shift = (raw[name].float().t().contiguous() for name in (_SCALE, _ZERO))
        codes = unpack(raw[_CODES].view(torch.uint8), 4) ^ 8
        return {"weight": pack(codes, 4), "scale": scale, "zero": 8 - shift / torch.where(scale == 0, 1.0, scale)}

    beside = ((k // group, n),)
    return Form(Grouped(4, group, "float32", "float32"), (
        Given(_CODES, ("int8", "uint8"), ((n, k // 2),)), Given(_SCALE, FLOATS, beside), Given(_ZERO, FLOATS, beside)), parts)


def _group(granularity: Any, k: int) -> int:
    """Columns that share a scale; 0: a row. ModelError for other shares."""
    said = granularity or {"_type": "PerRow"}
    kind = said.get("_type")
    group = int(said["_data"]["group_size"]) if kind == "PerGroup" else 0
    if kind not in ("PerRow", "PerAxis", "PerGroup") or (group and k % group):
        raise ModelError(f"quantization_config: granularity {said} with rows of {k} columns is not known; possible are PerRow, "
                         "PerAxis, and PerGroup of whole groups")
    return 0 if group == k else group


class _TorchAO(Reader):
    methods = ("torchao",)
    suffixes = (_CODES, _SCALE, _ZERO, "weight")

    def __init__(self, config: Mapping[str, Any]) -> None:
        said = config.get("quant_type")
        kind = said.get("default") if isinstance(said, dict) else None
        if not isinstance(kind, dict):
            raise ModelError(f"quantization_config: quant_type is {said!r}; possible is a config of torchao "
                             "(quantize it with torchao 0.15 or newer)")
        self._dtype = str(config.get("model_dtype", "bfloat16"))
        self._plain = config.get("modules_to_not_convert") or []
        self._ends = bool(config.get("include_input_output_embeddings"))
        by_name = kind["_data"] if kind.get("_type") in ("FqnToConfig", "ModuleFqnToConfig") else {}
        self._by_name: Mapping[str, Any] = by_name.get("fqn_to_config") or by_name.get("module_fqn_to_config") or {}
        self._usual = self._by_name.get("_default") if by_name else kind

    def form(self, module: str, n: int, k: int) -> Form | None:
        own = next((kind for name, kind in self._by_name.items() if name.removesuffix(".weight") == module or (
            name.startswith("re:") and re.fullmatch(name[3:], module))), self._usual)
        if own is None or named(module, self._plain) or (own is self._usual and outside_linears(module) and not self._ends):
            return None
        kind, said = setting(own, "_type", _KINDS), own.get("_data") or {}
        if kind == "Int4WeightOnlyConfig":
            packing = said.get("int4_packing_format") or {}
            packing = packing.get("_data") if isinstance(packing, dict) else packing
            setting({"int4_packing_format": str(packing or "PLAIN").upper()}, "int4_packing_format", ("PLAIN",))
            return _plain_int4(n, k, int(said.get("group_size") or 128))
        if "Intx" in kind:
            bits = int(str(said["weight_dtype"]["_data"]).removeprefix("int"))
            share = said.get("weight_granularity" if "Activation" in kind else "granularity")
            mapping = said.get("weight_mapping_type" if "Activation" in kind else "mapping_type") or {"_data": "SYMMETRIC"}
            return signed(n, k, bits, _group(share, k), self._dtype, symmetric=mapping["_data"] == "SYMMETRIC", names=_NAMES)
        activation: Activation = "token" if "Dynamic" in kind else "none"
        given = Given(_CODES, ("int8" if kind.startswith("Int8") else "float8_e4m3fn",), ((n, k),))
        group = int(said.get("group_size") or 0) or (0 if kind.startswith("Float8") else _group(said.get("granularity"), k))
        if group:
            return signed(n, k, 8, group, self._dtype, names=_NAMES)
        return Form(FP8(activation) if kind.startswith("Float8") else Int8(activation), (
            given, whole(_SCALE, n), Given(_ZERO, ("int8",), ((n, 1), (n,)), optional=True)),
                    lambda raw: {"scale": by_row(raw[_SCALE], n)}, {"weight": _CODES})
