"""AMD's Quark: FP8, INT8 and MXFP4, with exceptions by layer."""

from collections.abc import Mapping
from typing import Any

from penstock.core.errors import ModelError
from penstock.quant.activations import Activation
from penstock.quant.dialects.compressed_tensors import int8_rows, mxfp
from penstock.quant.dialects.fp8 import by_rows
from penstock.quant.form import Form, Reader, named, outside_linears, setting

METHODS = ("quark",)


def _activation(given: Mapping[str, Any] | None) -> Activation:
    if not given:
        return "none"
    return "token" if given.get("is_dynamic") else "tensor"


class _Quark(Reader):
    suffixes = ("weight", "weight_scale", "weight_zero_point", "input_scale", "input_zero_point", "output_scale")

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._whole: Mapping[str, Any] = config.get("global_quant_config") or {}
        self._layers: Mapping[str, Any] = config.get("layer_quant_config") or {}
        self._plain = config.get("exclude") or []
        if config.get("layer_type_quant_config"):
            raise ModelError("quantization_config: layer_type_quant_config is not supported; possible is layer_quant_config")

    def form(self, module: str, n: int, k: int) -> Form | None:
        if outside_linears(module) or named(module, self._plain):
            return None
        config = next((layer for name, layer in self._layers.items() if named(module, [name])), self._whole)
        weight = config.get("weight")
        if not weight:
            return None
        weight = weight[0] if isinstance(weight, list) else weight
        given = config.get("input_tensors")
        activation = _activation(given[0] if isinstance(given, list) else given)
        kind = setting(weight, "dtype", ("fp8_e4m3", "int8", "fp4"))
        if kind == "fp4":
            setting(weight, "qscheme", ("per_group",))
            setting(weight, "group_size", (32,))
            setting(weight, "scale_format", ("e8m0",))
            return mxfp(n, k, 4, "weight")
        setting(weight, "qscheme", ("per_tensor", "per_channel"))
        if kind == "fp8_e4m3":
            return by_rows(n, k, activation)
        return int8_rows(n, k, activation)


reader = _Quark
