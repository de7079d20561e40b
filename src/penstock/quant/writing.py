"""Quantized checkpoints as other programs read them: a scheme's parts in the tensors of compressed-tensors, and its config.

`quant/dialects/compressed_tensors.py` reads what is written here."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from penstock.core.errors import ConfigError
from penstock.ops.bits import pack
from penstock.quant.form import outside_linears
from penstock.quant.fp8 import FP8
from penstock.quant.integer import Grouped, Int8
from penstock.quant.microscaling import MX, NVFP4
from penstock.quant.scheme import Scheme

Parts = Mapping[str, torch.Tensor]


def writable(scheme: Scheme, dtype: str) -> Scheme:
    """The scheme as it is written for a model of `dtype`. ConfigError for one that the format does not have."""
    if isinstance(scheme, Grouped) and scheme.bits in (4, 8) and not scheme.ordered:
        return dataclasses.replace(scheme, scales=dtype)
    if isinstance(scheme, FP8 | Int8 | MX | NVFP4):
        return scheme
    raise ConfigError(f"compressed-tensors has no {scheme.name}; possible are fp8, fp8_block, fp8_weights, int8, int8_weights, "
                      "int4, int4_zeros, mxfp4, mxfp8 and nvfp4")


def tensors(scheme: Scheme, parts: Parts, dtype: torch.dtype, k: int) -> dict[str, torch.Tensor]:
    """A module's tensors by suffix."""
    weight = parts["weight"]
    if isinstance(scheme, FP8 | Int8):
        scale = parts["scale"] if isinstance(scheme, FP8) and scheme.block is not None else parts["scale"][:, None]
        return {"weight": weight, "weight_scale": scale}
    if isinstance(scheme, NVFP4):
        return {"weight_packed": weight, "weight_scale": parts["scale"],
                "weight_global_scale": parts["global_scale"][:1].clone()}
    if isinstance(scheme, MX):
        return {"weight_packed" if scheme.bits == 4 else "weight": weight, "weight_scale": parts["scale"]}
    assert isinstance(scheme, Grouped), scheme
    found = {"weight_packed": _words(weight), "weight_scale": parts["scale"].to(dtype),
             "weight_shape": torch.tensor([weight.shape[0], k])}
    if scheme.zeros:
        zeros = pack(_filled(parts["zero"].t().contiguous(), 32 // scheme.bits), scheme.bits)
        found["weight_zero_point"] = _words(zeros).t().contiguous()
    return found


def _filled(codes: torch.Tensor, each: int) -> torch.Tensor:
    return torch.nn.functional.pad(codes, (0, -codes.shape[-1] % each))


def _words(packed: torch.Tensor) -> torch.Tensor:
    """Bytes of a row as int32 words, zeros behind the last."""
    filled = _filled(packed, 4)
    return filled.flatten().view(torch.int32).view(*filled.shape[:-1], -1)


def config(schemes: Mapping[str, Scheme], plain: list[str]) -> dict[str, Any]:
    """`quantization_config` for modules by scheme, and those that stay plain."""
    kinds: dict[Scheme, list[str]] = {}
    for module, scheme in schemes.items():
        kinds.setdefault(scheme, []).append(module)
    groups, forms = {}, set[str]()
    for place, (scheme, modules) in enumerate(kinds.items()):
        form, weights, inputs = _described(scheme)
        forms.add(form)
        # To readers heads and routers are plain unless they are named.
        groups[f"group_{place}"] = {"targets": modules if len(kinds) > 1 or any(map(outside_linears, modules)) else ["Linear"],
                                    "weights": weights, "input_activations": inputs, "output_activations": None, "format": form}
    return {"quant_method": "compressed-tensors", "format": forms.pop() if len(forms) == 1 else "mixed-precision",
            "quantization_status": "compressed", "config_groups": groups, "ignore": plain, "kv_cache_scheme": None}


def _described(scheme: Scheme) -> tuple[str, dict[str, Any], dict[str, Any] | None]:
    """(format, weights, input_activations) of a group."""
    weights: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False,
                               "observer": "minmax"}
    if isinstance(scheme, FP8):
        weights |= {"type": "float"}
        if scheme.block is not None:
            weights |= {"strategy": "block", "block_structure": list(scheme.block)}
        return "float-quantized", weights, _inputs(scheme.activation, "float")
    if isinstance(scheme, Int8):
        return "int-quantized", weights, _inputs(scheme.activation, "int")
    if isinstance(scheme, Grouped):
        weights |= {"num_bits": scheme.bits, "symmetric": not scheme.zeros, "strategy": "group" if scheme.group else "channel",
                    "group_size": scheme.group or None}
        return "pack-quantized", weights, None
    if isinstance(scheme, NVFP4):
        weights |= {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
        return "nvfp4-pack-quantized", weights, None
    assert isinstance(scheme, MX), scheme
    bits = scheme.bits
    weights |= {"num_bits": bits, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    return f"mxfp{bits}-{'pack-' if bits == 4 else ''}quantized", weights, None


def _inputs(activation: str, kind: str) -> dict[str, Any] | None:
    if activation == "none":
        return None
    found: dict[str, Any] = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    return {**found, "strategy": "group", "group_size": 128} if activation == "group" else found
