"""AWQ as AutoAWQ's "gemm" version writes it: int32 words along the outputs, their nibbles interleaved."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from penstock.core.errors import ModelError
from penstock.ops.bits import pack, turned, unpack
from penstock.quant.form import FLOATS, Form, Given, Reader, Tensors, named, outside_linears, setting
from penstock.quant.integer import Grouped


def form(n: int, k: int, group: int, zeros: bool, names: tuple[str, str, str] = ("qweight", "scales", "qzeros"), *,
         signed: bool = False, interleaved: bool = True) -> Form:
    """`group` 0 is the whole row. names: the suffixes of codes, scales and zeros."""
    groups, (weight, scale, zero) = -(-k // group) if group else 1, names

    def rows(words: torch.Tensor) -> torch.Tensor:
        """Codes of rows uint8 [n, k / 2], the middle one for 0."""
        codes = turned(words) if interleaved else pack(unpack(words.contiguous().view(torch.uint8), 4).t().contiguous(), 4)
        return codes ^ 0x88 if signed else codes

    def parts(raw: Tensors) -> dict[str, torch.Tensor]:
        found = {"weight": rows(raw[weight]), "scale": raw[scale].to(torch.float16).t().contiguous()}
        if zero in raw:
            found["zero"] = unpack(rows(F.pad(raw[zero], (0, 0, 0, groups % 2))), 4)[:, :groups].contiguous()
        if zero in raw and not zeros and bool((found.pop("zero") != 8).any()):
            raise ModelError("quantization_config: codes are symmetric, but zeros differ from the middle")
        return found

    return Form(Grouped(4, group, "uint8" if zeros else ""),
                (Given(weight, ("int32",), ((k, n // 8),)), Given(scale, FLOATS, ((groups, n),)),
                 Given(zero, ("int32",), ((groups, n // 8),), optional=not zeros)), parts)


class AWQ(Reader):
    methods = ("awq",)
    suffixes = ("qweight", "qzeros", "scales")

    def __init__(self, config: Mapping[str, Any]) -> None:
        setting(config, "bits" if "bits" in config else "w_bit", (4,))
        setting(config, "version", ("gemm", "GEMM"), "gemm")
        self._group = max(0, int(config.get("group_size") or config.get("q_group_size") or 0))
        self._zeros = bool(config.get("zero_point", True))
        self._plain = config.get("modules_to_not_convert") or []

    def form(self, module: str, n: int, k: int) -> Form | None:
        if outside_linears(module) or named(module, self._plain):
            return None
        return form(n, k, self._group, self._zeros)
