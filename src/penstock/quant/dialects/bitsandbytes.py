"""bitsandbytes as transformers writes it: NF4 and FP4 in blocks, whose scales may be quantized themselves, and LLM.int8."""

import json
from collections.abc import Mapping
from typing import Any

import torch

from penstock.core.errors import ModelError
from penstock.ops.bits import unpack
from penstock.quant.form import FLOATS, Form, Given, Reader, Tensors, named, outside_linears, setting
from penstock.quant.integer import Int8
from penstock.quant.normal import TABLES, Table4
from penstock.quant.scheme import PLAIN

_BLOCK = 64
"""Numbers that share a scale; transformers offers no other."""


def _four(n: int, k: int, kind: str, nested: bool, storage: str) -> Form:
    blocks, state = -(-n * k // _BLOCK), f"weight.quant_state.bitsandbytes__{kind}"

    def parts(raw: Tensors) -> dict[str, torch.Tensor]:
        said = json.loads(bytes(raw[state].cpu().tolist()))
        if said["quant_type"] != kind or said["blocksize"] != _BLOCK or list(said["shape"]) != [n, k]:
            raise ModelError(f"its quant_state is {said}; possible are {kind}, blocks of {_BLOCK} and shape [{n}, {k}]")
        absmax = raw["weight.absmax"]
        if nested:
            scales = raw["weight.nested_absmax"].repeat_interleave(int(said["nested_blocksize"]))[:blocks]
            absmax = raw["weight.nested_quant_map"][absmax.long()] * scales + said["nested_offset"]
        # Of two codes in a byte the first is in the high bits.
        codes = raw["weight"].flatten().view(torch.uint8)
        codes = codes << 4 | codes >> 4
        if k % _BLOCK == 0:
            return {"weight": codes.view(n, k // 2), "absmax": absmax.float().view(n, k // _BLOCK)}
        # Blocks that reach over the ends of rows: decoded as it is loaded.
        values = torch.tensor(TABLES[kind], device=codes.device)[unpack(codes, 4).long()]
        return {"weight": (values * absmax.float().repeat_interleave(_BLOCK)[:n * k]).view(n, k)}

    return Form(Table4(kind, _BLOCK) if k % _BLOCK == 0 else PLAIN, (
        Given("weight", (storage,), ((n * k // 2 // getattr(torch, storage).itemsize, 1),)),
        Given("weight.absmax", ("uint8",) if nested else ("float32",), ((blocks,),)),
        Given("weight.quant_map", ("float32",), ((16,),)),
        Given("weight.nested_absmax", ("float32",), optional=not nested),
        Given("weight.nested_quant_map", ("float32",), ((256,),), optional=not nested), Given(state, ("uint8",))), parts)


def _eight(n: int, k: int) -> Form:
    def parts(raw: Tensors) -> dict[str, torch.Tensor]:
        if "weight_format" in raw and bool(raw["weight_format"].any()):
            raise ModelError(f"weight_format is {raw['weight_format'].tolist()}; possible is 0 (rows, not tiles for a GPU)")
        return {"scale": raw["SCB"].float() / 127}

    return Form(Int8(), (Given("weight", ("int8",), ((n, k),)), Given("SCB", FLOATS, ((n,),)),
                         Given("weight_format", ("uint8",), optional=True)), parts, {"weight": "weight"})


class _BitsAndBytes(Reader):
    methods = ("bitsandbytes",)
    suffixes = ("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map",
                "weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4", "SCB", "weight_format")

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._eight = bool(config.get("load_in_8bit"))
        self._kind = setting(config, "bnb_4bit_quant_type", tuple(TABLES), "fp4")
        self._nested = bool(config.get("bnb_4bit_use_double_quant"))
        storage = str(config.get("bnb_4bit_quant_storage") or "uint8").removeprefix("torch.")
        self._storage: str = setting({"bnb_4bit_quant_storage": storage}, "bnb_4bit_quant_storage", ("uint8", *FLOATS))
        self._plain = ["lm_head"] if config.get("llm_int8_skip_modules") is None else config["llm_int8_skip_modules"]

    def form(self, module: str, n: int, k: int) -> Form | None:
        if (outside_linears(module) and not module.endswith("lm_head")) or named(module, self._plain):
            return None
        return _eight(n, k) if self._eight else _four(n, k, self._kind, self._nested, self._storage)
