"""compressed-tensors, which llm-compressor writes: groups of modules, each with its own format. Schemes' parts are written as
compressed-tensors, too.

`kv_cache_scheme` and its scales concern the cache (`models/caching.py`)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from penstock.core.errors import ConfigError, ModelError
from penstock.ops.bits import pack, unpack
from penstock.quant.dialects.fp8 import by_blocks, by_rows
from penstock.quant.form import FLOATS, Form, Given, Reader, Tensors, by_row, named, outside_linears, setting, single, whole
from penstock.quant.fp8 import FP8
from penstock.quant.integer import Grouped, Int8
from penstock.quant.microscaling import MX, MXFP4, MXFP8, NVFP4
from penstock.quant.scheme import Activation, Scheme

_FORMATS = ("dense", "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized",
            "mxfp4-pack-quantized", "mxfp8-quantized")


_ROUNDINGS = {"int": "int8", "float": "float8_e4m3fn"}


def _words(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """int32 words along the last axis as `count` codes: a stream of bits, or as older versions wrote 3 bits, ten codes each."""
    if packed.shape[-1] == -(-count * bits // 32):
        filled = F.pad(packed, (0, -packed.shape[-1] % bits)).contiguous()
        return unpack(filled.view(torch.uint8), bits)[..., :count]
    shifts = torch.arange(32 // bits, dtype=torch.int32, device=packed.device) * bits
    return (packed[..., None] >> shifts & (1 << bits) - 1).flatten(-2)[..., :count].to(torch.uint8)


def _packed(n: int, k: int, bits: int, group: int, *, symmetric: bool, ordered: bool, dtype: str) -> Form:
    """Codes in int32 words along the inputs; the middle code stands for 0."""
    groups, middle = -(-k // group) if group else 1, 1 << bits - 1
    words, zeros = ((-(-count * bits // 32), -(-count // (32 // bits))) for count in (k, n))

    def parts(raw: Tensors) -> dict[str, torch.Tensor]:
        codes = _words(raw["weight_packed"], bits, k)
        found = {"scale": raw["weight_scale"].contiguous().view(n, groups)}
        if not symmetric:
            found["zero"] = _words(raw["weight_zero_point"].t().contiguous(), bits, n).t().contiguous()
        if not ordered and "weight_g_idx" in raw:
            raise ModelError("quantization_config: actorder is not 'group', but there is a weight_g_idx")
        if ordered and "weight_g_idx" in raw and bool((raw["weight_g_idx"] >= 0).all()):
            order = raw["weight_g_idx"].long().argsort(stable=True)
            codes, found["order"] = codes[:, order], order.int()
        elif ordered:
            found["order"] = torch.arange(k, dtype=torch.int32, device=codes.device)
        return {"weight": pack(codes, bits), **found}

    if k % 8 or middle > 128:
        raise ModelError(f"a matrix [{n}, {k}] cannot be stored in codes of {bits} bits")
    return Form(Grouped(bits, group, "" if symmetric else "uint8", dtype, ordered),
                (Given("weight_packed", ("int32",), tuple((n, wide) for wide in words)),
                 Given("weight_scale", FLOATS, ((n, groups), (n,)) if groups == 1 else ((n, groups),)),
                 Given("weight_zero_point", ("int32",), tuple((tall, groups) for tall in zeros), optional=symmetric),
                 Given("weight_g_idx", ("int32",), ((k,),), optional=True),
                 Given("weight_shape", ("int64", "int32"), ((2,),), optional=True)), parts)


def int8_rows(n: int, k: int, activation: Activation) -> Form:
    """int8 codes with a scale for the tensor or for each row. Zero points must be zero."""
    zeros = [f"{name}_zero_point" for name in ("weight", "input")]

    def parts(raw: Tensors) -> dict[str, torch.Tensor]:
        for name in raw.keys() & zeros:
            if bool(raw[name].any()):
                raise ModelError(f"{name} differs from 0; possible are integers that are symmetric")
        found = {"scale": by_row(raw["weight_scale"], n)}
        return found | {"input_scale": single(raw["input_scale"])} if activation == "tensor" else found

    return Form(Int8(activation), (
        Given("weight", ("int8",), ((n, k),)), whole("weight_scale", n),
        whole("input_scale", 1, optional=activation != "tensor"),
        *(Given(name, ("int8", "int32"), optional=True) for name in zeros)), parts, {"weight": "weight"})


def signed(n: int, k: int, bits: int, group: int, dtype: str, *, symmetric: bool = True,
           names: tuple[str, str, str] = ("weight", "weight_scale", "weight_zero_point")) -> Form:
    """Codes of up to 8 bits, each in a byte, with a scale and a zero point for each group (0: for each row)."""
    stored = next((possible for possible in (2, 3, 4, 8) if possible >= bits), 8)
    groups, middle, (codes, scale, zeros) = -(-k // group) if group else 1, 1 << stored - 1, names

    def parts(raw: Tensors) -> dict[str, torch.Tensor]:
        zero = raw[zeros].int().view(n, groups) if zeros in raw else torch.zeros(1, dtype=torch.int32)
        found = {"weight": pack((raw[codes].int() + middle).to(torch.uint8), stored),
                 "scale": raw[scale].contiguous().view(n, groups)}
        if symmetric and bool(zero.any()):
            raise ModelError("quantization_config: the mapping is symmetric, but zero points differ from 0")
        return found if symmetric else {**found, "zero": (zero + middle).to(torch.uint8)}

    shapes = ((n, groups), (n,)) if groups == 1 else ((n, groups),)
    return Form(Grouped(stored, group, "" if symmetric else "uint8", dtype), (
        Given(codes, ("int8",), ((n, k),)), Given(scale, FLOATS, shapes),
        Given(zeros, ("int8", "int32"), shapes, optional=symmetric)), parts)


def nvfp4(n: int, k: int, packed: str, over: str, inputs: str, *, divides: bool) -> Form:
    """Names of the codes, of the scale of the whole, which may divide, and of that of inputs, which is not used."""
    return Form(NVFP4(divides), (
        Given(packed, ("uint8",), ((n, k // 2),)), Given("weight_scale", ("float8_e4m3fn",), ((n, k // 16),)),
        whole(over, 1), whole(inputs, 1, optional=True)),
        lambda raw: {"global_scale": by_row(raw[over], n)}, {"weight": packed, "scale": "weight_scale"})


def mxfp(n: int, k: int, bits: int, name: str) -> Form:
    """`name`: of the codes."""
    given = Given(name, ("uint8",) if bits == 4 else ("float8_e4m3fn",), ((n, k * bits // 8),))
    return Form(MXFP4() if bits == 4 else MXFP8(), (given, Given("weight_scale", ("uint8", "float8_e8m0fnu"), ((n, k // 32),))),
                lambda raw: {"scale": raw["weight_scale"].view(torch.uint8)}, {"weight": name})


class _CompressedTensors(Reader):
    methods = ("compressed-tensors", "compressed_tensors")
    suffixes = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape",
                "weight_global_scale", "input_scale", "input_zero_point", "input_global_scale", "output_scale")

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._format = setting(config, "format", (*_FORMATS, "mixed-precision"), "dense")
        self._dtype = str(config.get("model_dtype", "bfloat16"))
        self._ignored = config.get("ignore") or []
        groups = list((config.get("config_groups") or {}).values())
        self._groups = [group for group in groups if group.get("weights")]
        if any(bool(group.get("weights")) == bool(group.get("output_activations")) for group in groups):
            raise ModelError("quantization_config: a group has no weights, or output_activations; possible are weights")
        if (kind := (config.get("sparsity_config") or {}).get("format")) not in (None, "dense"):
            raise ModelError(f"quantization_config: sparsity_config's format is {kind!r}; possible is 'dense'")
        if config.get("transform_config"):
            raise ModelError("quantization_config: transform_config (rotations of activations) is given; possible is none")

    def form(self, module: str, n: int, k: int) -> Form | None:
        if named(module, self._ignored):
            return None
        for group in self._groups:
            if named(module, [target for target in group["targets"] if target != "Linear"]):
                return self._of(group, module, n, k)
        if "embed" in module.rpartition(".")[2]:
            return None
        linear = next((group for group in self._groups if "Linear" in group["targets"]), None)
        if linear is None or (outside_linears(module) and not module.endswith("lm_head")):
            return None
        return self._of(linear, module, n, k)

    def _of(self, group: Mapping[str, Any], module: str, n: int, k: int) -> Form | None:
        weights, kind = group["weights"], group.get("format") or self._format
        bits = setting(weights, "num_bits", (2, 3, 4, 8), 8)
        floating = setting(weights, "type", ("int", "float"), "int") == "float"
        size, symmetric = max(0, int(weights.get("group_size") or 0)), bool(weights.get("symmetric", True))
        strategy = setting(weights, "strategy", ("tensor", "channel", "group", "block", "tensor_group"),
                           "group" if size else "channel" if weights.get("group_size") else "tensor")
        if kind == "dense":
            return None
        if kind == "nvfp4-pack-quantized" or (floating and strategy == "tensor_group"):
            return nvfp4(n, k, "weight_packed", "weight_global_scale", "input_global_scale", divides=True)
        if floating and strategy == "group" and size == 32:
            return mxfp(n, k, bits, "weight_packed" if bits == 4 else "weight")
        if floating and bits == 8:
            activation = _activation(group.get("input_activations"), "float")
            if strategy == "block":
                block = weights.get("block_structure") or (128, 128)
                block = [int(size) for size in block.split("x")] if isinstance(block, str) else block
                return by_blocks(n, k, (int(block[0]), int(block[1])), activation, "weight_scale")
            if strategy in ("tensor", "channel"):
                return by_rows(n, k, activation)
        elif not floating and kind == "pack-quantized" and strategy in ("group", "channel"):
            return _rounded(_packed(n, k, bits, size, symmetric=symmetric, dtype=self._dtype,
                                    ordered=weights.get("actorder") in ("group", "dynamic", True)), module, group)
        elif not floating and bits == 8 and symmetric and strategy in ("tensor", "channel", "group"):
            if strategy == "group":
                return _rounded(signed(n, k, bits, size, self._dtype), module, group)
            return int8_rows(n, k, _activation(group.get("input_activations"), "int"))
        raise ModelError(f"quantization_config: format {kind!r} with weights of {bits} bits, type {weights.get('type')!r}, "
                         f"strategy {strategy!r}, symmetric {symmetric} is not known; formats are {', '.join(_FORMATS)}")


def _rounded(form: Form, module: str, group: Mapping[str, Any]) -> Form:
    """With inputs of 8 bits, if the group asks for them."""
    given = group.get("input_activations")
    if given is None:
        return form
    kind = setting(given, "type", _ROUNDINGS, "int")
    activation = _activation(given, kind)
    if activation == "tensor" or ".experts." in module:
        raise ModelError(f"quantization_config: {module} has {form.scheme.name} beside input_activations {dict(given)}; "
                         "possible are dynamic scales for each token, and no experts")
    assert isinstance(form.scheme, Grouped)
    return replace(form, scheme=replace(form.scheme, activation=activation, rounding=_ROUNDINGS[kind]))


def _activation(given: Mapping[str, Any] | None, kind: str) -> Activation:
    if given is None:
        return "none"
    setting(given, "num_bits", (8,), 8)
    setting(given, "type", (kind,), kind)
    if not given.get("symmetric", True):
        raise ModelError("quantization_config: input_activations with symmetric false are not supported; possible is true")
    strategy = setting(given, "strategy", ("token", "tensor", "group"), "tensor")
    if strategy == "group":
        setting(given, "group_size", (128,))
        return "group"
    # Dynamic scales for whole tensors would make a token's answer depend on its batch: each token has its own.
    return "token" if given.get("dynamic", False) or strategy == "token" else "tensor"


def writable(scheme: Scheme, dtype: str) -> Scheme:
    """The scheme as it is written for a model of `dtype`. ConfigError for one that the format does not have."""
    if isinstance(scheme, Grouped) and scheme.bits in (4, 8) and not scheme.ordered:
        return replace(scheme, scales=dtype)
    if isinstance(scheme, FP8 | Int8 | MX | NVFP4):
        return scheme
    raise ConfigError(f"compressed-tensors has no {scheme.name}; possible are fp8, fp8_block, fp8_weights, int8, int8_weights, "
                      "int4, int4_zeros, mxfp4, mxfp8 and nvfp4")


def tensors(scheme: Scheme, parts: Tensors, dtype: torch.dtype, k: int) -> dict[str, torch.Tensor]:
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
    found = {"weight_packed": _as_words(weight), "weight_scale": parts["scale"].to(dtype),
             "weight_shape": torch.tensor([weight.shape[0], k])}
    if scheme.zeros:
        zeros = parts["zero"].t().contiguous()
        zeros = pack(F.pad(zeros, (0, -zeros.shape[-1] % (32 // scheme.bits))), scheme.bits)
        found["weight_zero_point"] = _as_words(zeros).t().contiguous()
    return found


def _as_words(packed: torch.Tensor) -> torch.Tensor:
    """Bytes of a row as int32 words, zeros behind the last."""
    filled = F.pad(packed, (0, -packed.shape[-1] % 4))
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
        block = {} if scheme.block is None else {"strategy": "block", "block_structure": list(scheme.block)}
        return "float-quantized", {**weights, "type": "float", **block}, _inputs(scheme.activation, "float")
    if isinstance(scheme, Int8):
        return "int-quantized", weights, _inputs(scheme.activation, "int")
    if isinstance(scheme, Grouped):
        return "pack-quantized", {
            **weights, "num_bits": scheme.bits, "symmetric": not scheme.zeros, "group_size": scheme.group or None,
            "strategy": "group" if scheme.group else "channel"}, None
    weights |= {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    if isinstance(scheme, NVFP4):
        return "nvfp4-pack-quantized", weights, None
    assert isinstance(scheme, MX), scheme
    weights |= {"num_bits": scheme.bits, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    return f"{scheme.name}-{'pack-' if scheme.bits == 4 else ''}quantized", weights, None


def _inputs(activation: str, kind: str) -> dict[str, Any] | None:
    if activation == "none":
        return None
    found: dict[str, Any] = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    return {**found, "strategy": "group", "group_size": 128} if activation == "group" else found
