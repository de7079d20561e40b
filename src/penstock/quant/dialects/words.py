"""Integers in int32 words: GPTQ as AutoGPTQ and GPTQModel write it, AWQ as AutoAWQ's "gemm" version does, and AutoRound, which
has the tensors of either and settings of its own."""

import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from penstock.core.errors import ModelError
from penstock.ops.bits import pack, turned, unpack
from penstock.quant.form import FLOATS, Form, Given, Reader, Tensors, named, outside_linears, setting
from penstock.quant.integer import Grouped


def gptq(n: int, k: int, bits: int, group: int, *, symmetric: bool, ordered: bool, older: bool) -> Form:
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
            if not torch.equal(raw["g_idx"].long()[order], torch.arange(k, device=order.device) // (group or k)):
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


class _GPTQ(Reader):
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
        return gptq(n, k, setting(config, "bits", (2, 3, 4, 8)), group, symmetric=bool(config.get("sym", True)),
                    ordered=bool(config.get("desc_act", False)), older=self._older)


def awq(n: int, k: int, group: int, zeros: bool, names: tuple[str, str, str] = ("qweight", "scales", "qzeros"), *,
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


class _AWQ(Reader):
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
        return awq(n, k, self._group, self._zeros)


_ZEROS = {"gptq": "gptq", "auto_gptq": "gptq",
          **dict.fromkeys(("auto_round", "gptqmodel", "exllamav2", "triton", "tritonv2"), "gptq_v2")}
"""Version of GPTQ's zeros by packing: only those that AutoGPTQ reads store one less."""


class _AutoRound(Reader):
    methods = ("auto-round", "auto_round", "intel/auto-round")
    suffixes = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, config: Mapping[str, Any]) -> None:
        # Before there was packing_format, the backend named the packing, perhaps with a kernel behind it.
        setting(config, "act_bits", (16, 32), 16)
        packing = str(config.get("packing_format") or config.get("backend") or "auto_round:auto_gptq")
        kind = packing.removeprefix("auto_round:").partition(":")[0]
        if kind not in (*_ZEROS, "awq", "auto_awq"):
            raise ModelError(f"quantization_config: packing_format is {packing!r}; possible are auto_round, and auto_round: "
                             f"with auto_awq, {', '.join(_ZEROS)}")
        self._config, self._reader = {**config, "checkpoint_format": _ZEROS.get(kind)}, _AWQ if "awq" in kind else _GPTQ
        self._extra: Mapping[str, Mapping[str, Any]] = config.get("extra_config") or {}
        blocks = config.get("block_name_to_quantize") or config.get("to_quant_block_names")
        self._blocks = [blocks] if isinstance(blocks, str) else list(blocks or [])
        self._blocks = [name.strip() for one in self._blocks for name in str(one).split(",")]

    def form(self, module: str, n: int, k: int) -> Form | None:
        own = next((values for name, values in self._extra.items() if module == name or re.fullmatch(name, module)), None)
        if own is None and self._blocks and not named(module, self._blocks):
            return None
        config = {**self._config, **(own or {})}
        if int(config.get("bits") or 4) >= 16:
            return None
        settings = {**config, "lm_head": own is not None, "zero_point": not config.get("sym", True), "desc_act": False}
        return self._reader(settings).form(module, n, k)
