"""AWQ as AutoAWQ's "gemm" version writes it: int32 words along the outputs, their nibbles interleaved."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from penstock.ops.bits import turned, unpack
from penstock.quant.form import FLOATS, Form, Given, Reader, Tensors, named, outside_linears, setting
from penstock.quant.integer import Grouped

METHODS = ("awq",)


def form(n: int, k: int, group: int, zeros: bool) -> Form:
    """`group` 0 is the whole row."""
    groups = -(-k // group) if group else 1

    def parts(raw: Tensors) -> dict[str, torch.Tensor]:
        found = {"weight": turned(raw["qweight"]), "scale": raw["scales"].to(torch.float16).t().contiguous()}
        words = F.pad(raw["qzeros"], (0, 0, 0, groups % 2)) if zeros else None
        return found if words is None else {**found, "zero": unpack(turned(words), 4)[:, :groups].contiguous()}

    return Form(Grouped(4, group, "uint8" if zeros else ""),
                (Given("qweight", ("int32",), ((k, n // 8),)), Given("scales", FLOATS, ((groups, n),)),
                 Given("qzeros", ("int32",), ((groups, n // 8),), optional=not zeros)), parts)


class _AWQ(Reader):
    suffixes = ("qweight", "qzeros", "scales")

    def __init__(self, config: Mapping[str, Any]) -> None:
        setting(config, "bits" if "bits" in config else "w_bit", (4,))
        setting(config, "version", ("gemm", "GEMM"), "gemm")
        group = int(config.get("group_size") or config.get("q_group_size") or -1)
        self._group = 0 if group == -1 else group
        self._zeros = bool(config.get("zero_point", True))
        self._plain = config.get("modules_to_not_convert") or []

    def form(self, module: str, n: int, k: int) -> Form | None:
        if outside_linears(module) or named(module, self._plain):
            return None
        return form(n, k, self._group, self._zeros)


reader = _AWQ
