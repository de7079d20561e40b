"""NVIDIA's modelopt: FP8 and NVFP4, one for all modules or by a list of them (MIXED_PRECISION)."""

from collections.abc import Mapping
from typing import Any

from penstock.core.errors import ModelError
from penstock.quant.dialects.compressed_tensors import mxfp, nvfp4
from penstock.quant.dialects.fp8 import by_blocks, by_rows
from penstock.quant.form import Form, Reader, named, outside_linears, setting

METHODS = ("modelopt", "modelopt_fp4")

_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MXFP8", "MIXED_PRECISION")


class _ModelOpt(Reader):
    suffixes = ("weight", "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")

    def __init__(self, config: Mapping[str, Any]) -> None:
        config = config.get("quantization", config)
        self._algorithm = _algorithm(config, _ALGORITHMS)
        self._plain = [*(config.get("exclude_modules") or []), *(config.get("ignore") or [])]
        self._layers: Mapping[str, Any] = config.get("quantized_layers") or {}

    def form(self, module: str, n: int, k: int) -> Form | None:
        algorithm = self._algorithm
        if algorithm == "MIXED_PRECISION":
            found = next((layer for name, layer in self._layers.items() if named(module, [name])), None)
            if found is None:
                return None
            algorithm = _algorithm(found, _ALGORITHMS[:-1])
        elif named(module, self._plain) or (outside_linears(module) and not module.endswith("lm_head")):
            return None
        if algorithm == "FP8":
            return by_rows(n, k, "tensor")
        if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
            return by_rows(n, k, "token")
        if algorithm == "FP8_PB_WO":
            return by_blocks(n, k, (128, 128), "none", "weight_scale")
        block = 32 if algorithm == "MXFP8" else 16
        if k % block:
            raise ModelError(f"{module} has rows of {k} columns, which blocks of {block} of {algorithm} do not fill")
        if algorithm == "MXFP8":
            return mxfp(n, k, 8, "weight")
        return nvfp4(n, k, "weight", "weight_scale_2", "input_scale", divides=False)


def _algorithm(config: Mapping[str, Any], possible: tuple[str, ...]) -> str:
    found: str = setting({"quant_algo": str(config.get("quant_algo")).upper()}, "quant_algo", possible)
    return found


reader = _ModelOpt
