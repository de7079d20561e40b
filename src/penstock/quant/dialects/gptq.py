"""GPTQ as AutoGPTQ, GPTQModel and AutoRound write it: codes packed in int32 along the inputs, zeros along the outputs."""

import re
from collections.abc import Mapping
from typing import Any

import torch

from penstock.core.errors import ModelError
from penstock.ops.bits import pack, unpack
from penstock.quant.form import Form, Given, Reader, Tensors, named, outside_linears, setting
from penstock.quant.integer import Grouped


def form(n: int, k: int, bits: int, group: int, *, symmetric: bool, ordered: bool, older: bool) -> Form:
    """`group` 0 is the whole row. `older`: zeros are stored as one less (version 1)."""
    if k * bits % 32 or n * bits % 32:
        raise ModelError(f"a matrix [{n}, {k}] cannot be packed by GPTQ with {bits} bits")
    groups = -(-k // group) if group else 1
    middle = 1 << bits - 1
    scheme = Grouped(bits, group, "" if symmetric else "uint8", "float16", ordered and groups > 1)

    def parts(raw: Tensors) -> dict[str, torch.Tensor]:
        # Words of 32 bits in a row are a stream of bits, lowest first, for 3 bits too.
        codes = raw["qweight"].t().contiguous().view(torch.uint8)
        zeros = unpack(raw["qzeros"].contiguous().view(torch.uint8), bits)
        zeros = (zeros.int() + 1 & 2 * middle - 1 if older else zeros).to(torch.uint8).t().contiguous()
        found = {"scale": raw["scales"].to(torch.float16).t().contiguous()}
        if not symmetric:
            found["zero"] = zeros
        elif not bool((zeros == middle).all() or (zeros == middle + 2 * older - 1).all()):  # as the other version stores them
            raise ModelError("quantization_config: sym is true, but zeros differ from the middle")
        if "g_idx" in raw:
            order = raw["g_idx"].long().argsort(stable=True)
            expected = torch.arange(k, device=order.device) // (group or k)
            if not torch.equal(raw["g_idx"].long()[order], expected):
                raise ModelError("g_idx does not put the same number of columns into each group")
            if scheme.ordered:
                codes, found["order"] = pack(unpack(codes, bits)[:, order], bits), order.int()
            elif not torch.equal(order, torch.arange(k, device=order.device)):
                raise ModelError("g_idx changes the order of columns, and desc_act is false")
        elif scheme.ordered:
            found["order"] = torch.arange(k, dtype=torch.int32, device=codes.device)
        return {"weight": codes, **found}

    return Form(scheme, (Given("qweight", ("int32",), ((k * bits // 32, n),)),
                         Given("qzeros", ("int32",), ((groups, n * bits // 32),)),
                         Given("scales", ("float16", "bfloat16", "float32"), ((groups, n),)),
                         Given("g_idx", ("int32",), ((k,),), optional=True)), parts)


class GPTQ(Reader):
    methods = ("gptq", "gptqmodel")
    suffixes = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        setting(config, "rotation", (None, ""))
        self._older = setting(config, "checkpoint_format", ("gptq", "gptq_v2"), config.get("format") or "gptq") == "gptq"
        self._head = bool(config.get("lm_head"))
        self._dynamic: Mapping[str, Any] = config.get("dynamic") or {}
        only = config.get("modules_in_block_to_quantize")
        self._only = [name for names in only for name in (names if isinstance(names, list) else [names])] if only else None

    def form(self, module: str, n: int, k: int) -> Form | None:
        config = dict(self._config)
        for pattern, values in self._dynamic.items():
            # "-:" leaves modules plain, "+:" (or nothing) changes settings, as GPTQModel defines it.
            if re.match(pattern.removeprefix("-:").removeprefix("+:"), module):
                if pattern.startswith("-:"):
                    return None
                config |= values
                break
        is_head = module.rpartition(".")[2] in ("lm_head", "embed_out")
        listed = self._head if is_head else self._only is None or named(module, self._only)
        if not listed or (not is_head and outside_linears(module)):
            return None
        group = max(0, int(config.get("group_size") or 0))
        return form(n, k, setting(config, "bits", (2, 3, 4, 8)), group, symmetric=bool(config.get("sym", True)),
                    ordered=bool(config.get("desc_act", False)), older=self._older)
