"""AMD's Quark, with the tensors of compressed-tensors and AWQ: one format for all modules, or exceptions by layer."""

from collections.abc import Mapping
from typing import Any

from penstock.core.errors import ModelError
from penstock.quant.dialects.compressed_tensors import int8_rows, mxfp
from penstock.quant.dialects.fp8 import by_rows
from penstock.quant.dialects.words import awq
from penstock.quant.form import Form, Reader, named, outside_linears, setting
from penstock.quant.scheme import Activation


def _first(given: Any) -> Mapping[str, Any]:
    return (given[0] if isinstance(given, list) else given) or {}


class _Quark(Reader):
    methods = ("quark",)
    suffixes = ("weight", "weight_scale", "weight_zero_point", "input_scale", "input_zero_point", "output_scale")

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._whole: Mapping[str, Any] = config.get("global_quant_config") or {}
        self._layers: Mapping[str, Any] = config.get("layer_quant_config") or {}
        self._plain = ["lm_head"] if config.get("exclude") is None else config["exclude"]
        self._export: Mapping[str, Any] = config.get("export") or {}
        given = config.get("algo_config") or []
        if any(one.get("r4") or one.get("online_r1_rotation") for one in (given if isinstance(given, list) else [given])):
            raise ModelError("quantization_config: algo_config rotates inputs while the model runs (r4, online_r1_rotation); "
                             "possible are rotations within the weights")
        setting(config, "layer_type_quant_config", (None, {}))

    def form(self, module: str, n: int, k: int) -> Form | None:
        if (outside_linears(module) and not module.endswith("lm_head")) or named(module, self._plain):
            return None
        config = next((layer for name, layer in self._layers.items() if named(module, [name])), self._whole)
        weight, given = _first(config.get("weight")), _first(config.get("input_tensors"))
        if not weight:
            return None
        activation: Activation = "none" if not given else "token" if given.get("is_dynamic") else "tensor"
        kind = setting(weight, "dtype", ("fp8_e4m3", "int8", "fp4", "uint4", "int4"))
        setting(weight, "qscheme", ("per_tensor", "per_channel") if kind in ("fp8_e4m3", "int8") else ("per_group",))
        if kind in ("uint4", "int4"):
            setting({"input_tensors": activation}, "input_tensors", ("none",))
            interleaved = setting(self._export, "pack_method", ("reorder", "order"), "reorder") == "reorder"
            return awq(n, k, int(weight.get("group_size") or 0), not weight.get("symmetric"), (
                "weight", "weight_scale", "weight_zero_point"), signed=kind == "int4", interleaved=interleaved)
        if kind == "fp4":
            setting(weight, "group_size", (32,))
            setting(weight, "scale_format", ("e8m0",))
            return mxfp(n, k, 4, "weight")
        return (by_rows if kind == "fp8_e4m3" else int8_rows)(n, k, activation)
