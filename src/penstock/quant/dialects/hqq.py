"""HQQ as hqq and transformers write it: matrices regrouped by scales, rows packed in runs, scales and zeros of any value."""

from collections.abc import Mapping
from typing import Any

import torch

from penstock.core.errors import ModelError
from penstock.ops.bits import pack
from penstock.quant.form import FLOATS, Form, Given, Reader, Tensors, outside_linears, setting
from penstock.quant.integer import Grouped
from penstock.quant.scheme import PLAIN

_STORED = {8: 8, 6: 8, 5: 8, 4: 4, 3: 3, 2: 2, 1.58: 2, 1: 1}
"""Bits that a code takes by the bits that it is said to have."""
_FACTS = ("nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float", "quant_scale", "quant_zero",
          "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize",
          "round_zero")
"""Facts of the config that every module repeats."""


def _codes(words: torch.Tensor, bits: int, rows: int) -> torch.Tensor:
    """Packed [words, width] as codes [rows, width]: a word has one row of each run of rows, the first in its highest bits."""
    each = 10 if bits == 3 else 8 // bits
    return torch.cat([words >> bits * (each - 1 - at) & (1 << bits) - 1 for at in range(each)])[:rows].to(torch.uint8)


def form(n: int, k: int, bits: float, group: int, axis: int) -> Form:
    """`group` numbers share a scale: consecutive ones of the flattened matrix (axis 1), or a column's of so many rows (0)."""
    stored, rows = _STORED[bits], n * k // group if axis == 1 else group
    width, by_columns = n * k // rows, axis == 1 and k % group == 0
    scheme = Grouped(max(2, stored), 0 if group == k else group, "float32", "float32") if by_columns else PLAIN
    if n * k % group or (by_columns and k % 8):
        raise ModelError(f"a matrix [{n}, {k}] cannot be stored by HQQ in groups of {group}")
    beside = ((rows, 1),) if axis == 1 else ((1, width),)

    def parts(raw: Tensors) -> dict[str, torch.Tensor]:
        for name, said in (("nbits", bits), ("axis", axis)):
            if name in raw and abs(float(raw[name]) - said) > 1e-3:
                raise ModelError(f"its {name} is {float(raw[name]):g}, the config's {said:g}")
        words = raw["W_q"].contiguous()
        if words.is_floating_point():
            words = words.view(torch.int32 if bits == 3 else torch.uint8)
        codes, scale, zero = _codes(words, stored, rows), raw["scale"].float(), raw["zero"].float()
        if not by_columns:
            return {"weight": ((codes.float() - zero) * scale).view(n, k)}
        return {"weight": pack(codes.view(n, k), max(2, stored)), "scale": scale.view(n, -1), "zero": zero.view(n, -1)}

    facts = [Given(name, ("uint8", "int32", "int64", "float32"), optional=True) for name in _FACTS]
    return Form(scheme, (Given("W_q", ("uint8", "int32", *FLOATS)), Given("scale", FLOATS, beside),
                         Given("zero", FLOATS, beside), *facts), parts)


class _HQQ(Reader):
    methods = ("hqq",)
    suffixes = ("W_q", "scale", "zero", *_FACTS)

    def __init__(self, config: Mapping[str, Any]) -> None:
        said: Mapping[str, Any] = config.get("quant_config") or {}
        self._usual = said if "weight_quant_params" in said else None
        self._by_tag: Mapping[str, Any] = {} if self._usual is not None else said
        self._plain = ["lm_head"] if config.get("skip_modules") is None else config["skip_modules"]

    def form(self, module: str, n: int, k: int) -> Form | None:
        # As HQQ names the modules of all layers: model.layers.3.mlp.up_proj is mlp.up_proj.
        tag = ".".join(part for part in module.split(".") if part not in ("model", "layers") and not part.isnumeric())
        given = self._by_tag.get(tag, self._usual)
        if not given or tag in self._plain or (outside_linears(module) and tag != "lm_head"):
            return None
        for name in ("scale_quant_params", "zero_quant_params"):
            setting(given, name, (None, {}))  # else they are quantized themselves
        weight = given.get("weight_quant_params") or {}
        bits, axis = setting(weight, "nbits", _STORED, 4), setting(weight, "axis", (0, 1), 0)
        setting(weight, "channel_wise", (True,), True)
        return form(n, k, bits, int(weight.get("group_size") or (k if axis == 1 else n)), axis)
