"""NVIDIA's modelopt, with the tensors of compressed-tensors: one format for all modules, or exceptions by layer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from penstock.core.errors import ModelError
from penstock.ops.bits import pack
from penstock.quant.dialects.compressed_tensors import mxfp, nvfp4
from penstock.quant.dialects.fp8 import by_blocks, by_rows
from penstock.quant.form import FLOATS, Form, Given, Reader, Tensors, named, outside_linears, setting
from penstock.quant.integer import Grouped
from penstock.quant.scheme import Factored

_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "W4A16_AWQ", "MXFP8",
               "MIXED_PRECISION")
_BEHIND_NO_NORM = ("o_proj", "down_proj")
"""Matrices whose inputs AWQ scales by a factor of their own; others find it in the norm before them."""


class _ModelOpt(Reader):
    methods = ("modelopt", "modelopt_fp4")
    suffixes = ("weight", "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")

    def __init__(self, config: Mapping[str, Any]) -> None:
        config = config.get("quantization", config)
        only_cache = config.get("quant_algo") is None and (config.get("kv_cache_quant_algo") or config.get("kv_cache_scheme"))
        self._algorithm = None if only_cache else _algorithm(config, _ALGORITHMS)
        self._plain = [*(config.get("exclude_modules") or []), *(config.get("ignore") or [])]
        self._group = int(config.get("group_size") or 128)
        self._layers: Mapping[str, Any] = config.get("quantized_layers") or {}

    def form(self, module: str, n: int, k: int) -> Form | None:
        algorithm, group = self._algorithm, self._group
        if algorithm == "MIXED_PRECISION":
            found = next((layer for name, layer in self._layers.items() if named(module, [name])), None)
            if found is None:
                return None
            algorithm, group = _algorithm(found, _ALGORITHMS[:-1]), int(found.get("group_size") or 128)
        elif algorithm is None or named(module, self._plain) or (outside_linears(module) and not module.endswith("lm_head")):
            return None
        if algorithm in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
            return by_rows(n, k, "tensor" if algorithm == "FP8" else "token")
        if algorithm == "FP8_PB_WO":
            return by_blocks(n, k, (128, 128), "none", "weight_scale")
        block = {"MXFP8": 32, "W4A16_AWQ": group}.get(algorithm, 16)
        if k % block:
            raise ModelError(f"{module} has rows of {k} columns, which blocks of {block} of {algorithm} do not fill")
        if algorithm == "MXFP8":
            return mxfp(n, k, 8, "weight")
        found = _int4(n, k, group) if algorithm == "W4A16_AWQ" else nvfp4(n, k, "weight", "weight_scale_2", "input_scale",
                                                                          divides=False)
        return _factored(found, k) if "AWQ" in algorithm and module.endswith(_BEHIND_NO_NORM) else found


def _int4(n: int, k: int, group: int) -> Form:
    """Signed codes of two rows in a byte, the first in the low bits."""
    return Form(Grouped(4, group, scales="float32"), (
        Given("weight", ("uint8",), ((n // 2, k),)), Given("weight_scale", FLOATS, ((n, k // group),))),
        lambda raw: {"weight": pack(torch.stack((raw["weight"] & 15, raw["weight"] >> 4), 1).flatten(0, 1) ^ 8, 4),
                     "scale": raw["weight_scale"].float()})


def _factored(form: Form, k: int) -> Form:
    def parts(raw: Tensors) -> dict[str, torch.Tensor]:
        return {**form.parts(raw), "factor": raw.get("pre_quant_scale", torch.ones(k)).float()}

    given = Given("pre_quant_scale", FLOATS, ((k,),), optional=True)
    return replace(form, scheme=Factored(form.scheme), given=(*form.given, given), parts=parts)


def _algorithm(config: Mapping[str, Any], possible: tuple[str, ...]) -> str:
    return str(setting({"quant_algo": str(config.get("quant_algo")).upper()}, "quant_algo", possible))
