"""FP8 as DeepSeek, Qwen and transformers write it (blocks, `weight_scale_inv`), and as AutoFP8 does (`weight_scale`). MXFP4 as
gpt-oss has it: the experts' matrices of a layer, stacked, as `NAME_blocks` and `NAME_scales`."""

from collections.abc import Mapping
from typing import Any

import torch

from penstock.core.errors import ModelError
from penstock.quant.form import FLOATS, Form, Given, Reader, Tensors, by_row, named, outside_linears, setting, single, whole
from penstock.quant.fp8 import FP8
from penstock.quant.microscaling import MXFP4
from penstock.quant.scheme import Activation

_KEPT = ("indexer.weights_proj", "eh_proj")  # plain in DeepSeek's files, though no list of the config says so


def by_rows(n: int, k: int, activation: Activation) -> Form:
    """A scale for the tensor or for each row. transformers has names of its own for scales of tensors."""
    static = activation == "tensor"
    # A given scale of activations is of use only if they are quantized by it.
    given = (Given("weight", ("float8_e4m3fn",), ((n, k),)), whole("weight_scale", n, unless="weight_scale_inv"),
             whole("weight_scale_inv", n, optional=True), whole("activation_scale", 1, optional=True),
             whole("input_scale", 1, optional=not static, unless="activation_scale"))

    def parts(raw: Tensors) -> dict[str, torch.Tensor]:
        found = {"scale": by_row(raw["weight_scale" if "weight_scale" in raw else "weight_scale_inv"], n)}
        if static:
            found["input_scale"] = single(raw["input_scale" if "input_scale" in raw else "activation_scale"])
        return found

    return Form(FP8(activation), given, parts, {"weight": "weight"})


def by_blocks(n: int, k: int, block: tuple[int, int], activation: Activation, scale: str = "weight_scale_inv") -> Form:
    """A scale for each block, which multiplies, whatever its name says."""
    shape = -(-n // block[0]), -(-k // block[1])
    wide = shape[0], 1, shape[1], 1  # modelopt's
    given = Given("weight", ("float8_e4m3fn",), ((n, k),)), Given(scale, (*FLOATS, "float8_e8m0fnu"), (shape, wide))
    return Form(FP8(activation, block), given, lambda raw: {"scale": raw[scale].float().view(shape)}, {"weight": "weight"})


class _FP8(Reader):
    methods = ("fp8", "fbgemm_fp8")
    suffixes = ("weight", "weight_scale_inv", "weight_scale", "input_scale", "activation_scale", "input_scale_ub")

    def __init__(self, config: Mapping[str, Any]) -> None:
        block = config.get("weight_block_size")
        if block is not None and (not isinstance(block, list) or len(block) != 2):
            raise ModelError(f"quantization_config: weight_block_size is {block!r}; possible is a list of rows and columns")
        self._block = None if block is None else (int(block[0]), int(block[1]))
        self._scheme = setting(config, "activation_scheme", ("dynamic", "static"), "dynamic")
        setting(config, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        self._plain = [*(config.get("modules_to_not_convert") or []), *(config.get("ignored_layers") or [])]

    def form(self, module: str, n: int, k: int) -> Form | None:
        if outside_linears(module) or module.endswith(_KEPT) or named(module, self._plain):
            return None
        if self._block is not None:
            if self._scheme == "static":
                raise ModelError("quantization_config: activation_scheme is 'static' with weight_block_size; possible is "
                                 "'dynamic'")
            # Activations are quantized in groups of 128 columns, as DeepSeek's kernels take them.
            return by_blocks(n, k, self._block, "group" if self._block[1] == 128 else "token")
        return by_rows(n, k, "tensor" if self._scheme == "static" else "token")


class _MXFP4(Reader):
    methods = ("mxfp4",)
    suffixes = ("_blocks", "_scales")

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._plain = config.get("modules_to_not_convert") or []

    def form(self, module: str, n: int, k: int) -> Form | None:  # noqa: ARG002 (a family's rule arranges all experts)
        if ".experts." not in f"{module}." or named(module, self._plain):
            return None
        # Blocks lie along the inputs, last, where the plain tensors are [E, inputs, outputs].
        return Form(MXFP4(), (Given("_blocks", ("uint8",)), Given("_scales", ("uint8",))),
                    lambda raw: {"weight": raw["_blocks"].flatten(-2).transpose(1, 2), "scale": raw["_scales"].transpose(1, 2)},
                    stacked=True)
