"""MXFP4 as gpt-oss has it: the experts' matrices of a layer, stacked, as `NAME_blocks` and `NAME_scales`."""

from collections.abc import Mapping
from typing import Any

from penstock.quant.form import Form, Given, Reader, named
from penstock.quant.microscaling import MXFP4


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
