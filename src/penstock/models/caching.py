"""Chooses each layer's codec of keys and values, by the options or the checkpoint, and how far recurrent states can go back."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.checkpoint.tensors import DTYPES, Stored, read_headers
from penstock.config.resolve import CacheAsked
from penstock.core.errors import ConfigError, ModelError
from penstock.layers.attention import AttentionSpec
from penstock.layers.delta import DeltaSpec
from penstock.layers.spec import ModelSpec
from penstock.ops.codec import CODECS, Codec, aged

AGED = "aged"
"""Plain on the device, and in fewer bits in the tiers behind it: no codec of a device's cache, but chosen as one."""
BACK, KEY = "penstock_back", "penstock_kv_cache"
"""Of a config, where `requested` puts `CacheAsked.back`, and its answer: {"codec", "plain", "scales"}."""
PLAIN = ("bfloat16", "float16", "float32")
ALIASES = {"fp8_e4m3": "fp8", "fp8_inc": "fp8", "int8_per_token_head": "int8", "int4_per_token_head": "int4",
           "turboquant_4bit_nc": "turbo4", "turboquant_3bit_nc": "turbo3"}
"""Names that vLLM has for the codecs."""

_SCALE = re.compile(r"(?:.*\.)?(?:layers|h|blocks|block)\.([0-9]+)\.(?:.*\.)?"
                    r"(?:([kv])_scale|([kv])_proj\.(?:[kv]_scale|output_scale)|(kv_scale|kv_cache_scale))")
"""A layer's scale of keys, of values, or of both."""


def requested(config: dict[str, Any], folder: Path, wanted: CacheAsked) -> dict[str, Any]:
    """A model's config with the codec of its cache, if it has one. ConfigError: the options ask for what does not exist."""
    config = {**config, BACK: wanted.back}
    asked = ALIASES.get(wanted.codec, wanted.codec)
    found = stated(config) if asked == "auto" else asked
    if asked in PLAIN or found is None:
        own = str(config.get("dtype") or config.get("torch_dtype") or asked).removeprefix("torch.")
        if asked in PLAIN and asked != (own if wanted.dtype == "auto" else wanted.dtype):
            raise ConfigError(f"kv_cache_dtype is {asked!r}, but the model computes in another dtype, which is its plain "
                              f"cache's too; set dtype to {asked}, or choose {', '.join(CODECS)}")
        for name, given in (("kv_cache_plain_layers", wanted.plain_layers), ("kv_cache_scales", wanted.scales)):
            if given:
                raise ConfigError(f"{name} is given, but the cache is plain; set kv_cache_dtype to {', '.join(CODECS)}")
        return config
    if found not in CODECS and found != AGED:
        raise ConfigError(f"kv_cache_dtype is {wanted.codec!r}; possible are auto, {', '.join(PLAIN)}, "
                          f"{', '.join([*CODECS, AGED, *ALIASES])}")
    fixed = found != AGED and CODECS[found].key.rule == "fixed"
    if wanted.scales and not fixed:
        raise ConfigError(f"kv_cache_scales are given, but {found} finds its own scales; leave them out, or use fp8")
    scales = _given(dict(wanted.scales))
    if fixed and not scales and not wanted.dummy:
        scales = stored(read_headers(folder))
    return {**config, KEY: {"codec": found, "plain": list(wanted.plain_layers), "scales": scales}}


def stated(config: Mapping[str, Any]) -> str | None:
    """The codec that a checkpoint says its scales are for; None if it says nothing. ModelError: one that is not known."""
    given = config.get("quantization_config") or {}
    inner = given.get("quantization")
    given = {**inner, **given} if isinstance(inner, Mapping) else given
    scheme = given.get("kv_cache_scheme") or given.get("kv_cache_quant_algo")
    if not scheme:
        return None
    if isinstance(scheme, Mapping):
        kind = str(scheme.get("type", "float")), str(scheme.get("num_bits", 8)), bool(scheme.get("dynamic"))
        found = {("float", "8", False): "fp8", ("float", "8", True): "fp8_per_token_head", ("int", "8", True): "int8"}.get(kind)
    else:
        found = {"FP8": "fp8", "STATIC": "fp8", "NVFP4": "nvfp4"}.get(str(scheme).upper())
    if found is None:
        raise ModelError(f"quantization_config stores keys and values as {scheme}, which Penstock does not know; set "
                         f"kv_cache_dtype to what it should use: {', '.join([*PLAIN, *CODECS])}")
    return found


def _given(scales: Mapping[str, str]) -> dict[str, list[float]]:
    if not scales:
        return {}
    try:
        found = {name: float(value) for name, value in scales.items()}
    except ValueError:
        found = {}
    if found.keys() != {"k", "v"} or not all(0 < one < float("inf") for one in found.values()):
        raise ConfigError(f"kv_cache_scales is {scales}; it takes two numbers above 0, as k=0.02,v=0.05")
    return {"*": [found["k"], found["v"]]}


def stored(tensors: Mapping[str, Stored]) -> dict[str, list[float]]:
    """Scales of keys and values by layer, as far as a checkpoint has them."""
    found: dict[str, list[float]] = {}
    for name, tensor in tensors.items():
        match = _SCALE.fullmatch(name)
        if match is None:
            continue
        layer = found.setdefault(match[1], [1.0, 1.0])
        which = match[2] or match[3]
        for place in (0, 1) if which is None else ("kv".index(which),):
            layer[place] = _number(tensor)
    return found


def _number(tensor: Stored) -> float:
    """A stored scale. Scales of several heads count as the largest, which none of them exceeds."""
    if tensor.dtype not in DTYPES:
        raise ModelError(f"{tensor.name} is a scale of the cache and has the type {tensor.dtype}; possible are F32, F16, BF16")
    with tensor.file.open("rb") as file:
        file.seek(tensor.start)
        data = bytearray(file.read(tensor.nbytes))
    values = torch.frombuffer(data, dtype=getattr(torch, DTYPES[tensor.dtype])).tolist() if data else []
    if not values or not 0 < max(values) < float("inf"):
        raise ModelError(f"{tensor.name} is {values[:4]}, which is no scale of a cache; set kv_cache_dtype to bfloat16, or "
                         "kv_cache_scales")
    return float(max(values))


def applied(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    """The model with its layers' codec. ConfigError: a layer cannot be stored so."""
    if back := config.get(BACK):
        spec = spec.changed(lambda mixer: replace(mixer, back=back) if isinstance(mixer, DeltaSpec) else mixer)
    asked = config.get(KEY)
    if asked is None:
        return spec
    name, scales = asked["codec"], asked["scales"]
    # A layer that reads another's keys and values finds them stored as that one's are.
    reads = [[mixer.reads for mixer in block.mixers if isinstance(mixer, AttentionSpec)] for block in spec.blocks]
    sources = [next((one for one in ones if one is not None), layer) for layer, ones in enumerate(reads)]
    plain = {sources[layer] for layer in _plain_layers(asked["plain"], spec)}
    # A delta net's state stays as it is. Tiers would keep it beside aged pages, which nobody has tried.
    kept = (AttentionSpec,) if name == AGED else (AttentionSpec, DeltaSpec)
    others = [mixer for block in spec.blocks for mixer in block.mixers if not isinstance(mixer, kept)]
    if not spec.attentions or any(mixer.states("float32") for mixer in others):
        raise ConfigError(f"kv_cache_dtype is {name!r}, but layers of this model keep other states than keys and values "
                          "(latents, or what transformers' modules run); use auto or the model's dtype")

    def changed(mixer: Any, layer: int) -> Any:
        layer = sources[layer]
        if not isinstance(mixer, AttentionSpec) or layer in plain:
            return mixer
        if name == AGED:
            coding = aged(mixer.head_size)
            return replace(mixer, aged=Codec(AGED, coding, coding))
        codec = CODECS[name]
        for coding in (codec.key, codec.value):
            if why := coding.misfit(mixer.head_size):
                fits = [name for name, one in CODECS.items() if not (one.key.misfit(mixer.head_size)
                                                                     or one.value.misfit(mixer.head_size))]
                raise ConfigError(f"kv_cache_dtype {codec.name!r} does not fit this model: {why}. Possible are "
                                  f"{', '.join(fits)}")
        return replace(mixer, codec=replace(codec, scales=tuple(scales.get(str(layer)) or scales.get("*") or (1.0, 1.0))))

    blocks = tuple(replace(block, stages=tuple(tuple(replace(branch, body=changed(branch.body, layer)) for branch in stage)
                                               for stage in block.stages)) for layer, block in enumerate(spec.blocks))
    return replace(spec, blocks=blocks)


def _plain_layers(asked: Sequence[str], spec: ModelSpec) -> set[int]:
    """Numbers of the layers that stay plain."""
    count, found = len(spec.blocks), set[int]()
    named = {"first": [0], "last": [count - 1],
             "sliding_window": [number for number, block in enumerate(spec.blocks)
                                if any(getattr(mixer, "window", 0) for mixer in block.mixers)]}
    for one in asked:
        if one not in named and not (re.fullmatch(r"-?[0-9]+", one) and -count <= int(one) < count):
            raise ConfigError(f"kv_cache_plain_layers has {one!r}; possible are first, last, sliding_window, and numbers from "
                              f"0 to {count - 1} or from -{count} to -1")
        found.update(named.get(one) or ([] if one in named else [int(one) % count]))
    return found
