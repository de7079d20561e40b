"""Keys and values as codes in the cache, on NVIDIA GPUs: the launch of ops/codec_kernel.py."""

from functools import cache

import torch

from penstock.ops import gpu
from penstock.ops.bits import with_bytes
from penstock.ops.codec import Coding, Scales, table
from penstock.ops.table import register


@register("cache_write", "triton", rank=10, supports=gpu.supports)
def cache_write(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                scales: Scales) -> None:
    from penstock.ops.codec_kernel import cache_write as kernel  # Triton: heavy, and not everywhere

    tokens, heads, size = k.shape
    if not tokens:
        return
    codec = scales.codec
    found: dict[str, int | float | str] = {}
    for name, coding in (("k", codec.key), ("v", codec.value)):
        tall = {8: 1, 4: 2, 3: 8}[coding.bits]
        found |= {f"{name}_form": coding.form, f"{name}_rule": coding.rule, f"{name}_peak": coding.peak,
                  f"{name}_least": coding.least, f"{name}_tall": tall, f"{name}_wide": gpu.covering(size // tall)}
    ks, vs = beside(scales.k, k_cache), beside(scales.v, v_cache)
    kernel[(tokens, heads)](
        k, v, slots, k_cache, v_cache, ks[0], vs[0], tabled(codec.key, k), tabled(codec.value, k), *codec.scales,
        *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], *ks[1:], *vs[1:], size=size,
        page=k_cache.shape[2], gguf=codec.key.gguf, num_warps=1, **gpu.linked(k.device), **found)


def beside(scales: torch.Tensor | None, cache: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """A kernel's arguments: scales and three strides; the codes stand in for scales that are not there."""
    page, head, slot = (0, 0, 0) if scales is None else scales.stride()[:3]
    return (cache if scales is None else scales), page, head, slot


def tabled(coding: Coding, x: torch.Tensor) -> torch.Tensor:
    """The coding's table on x's device, of 16 values with their bytes; x stands in for none."""
    return _tabled(coding, x.device) if coding.magnitudes else x


@cache
def _tabled(coding: Coding, device: torch.device) -> torch.Tensor:
    found = table(coding, device)
    return with_bytes(found, torch.float16) if len(found) == 16 else found


def decoding(scales: Scales | None, k_cache: torch.Tensor, v_cache: torch.Tensor,
             x: torch.Tensor) -> tuple[tuple[torch.Tensor | int, ...], dict[str, int], tuple[float, float]]:
    """Launches that read a cache, of codes or of plain numbers, are given this of it: arguments (scales of keys and values,
    tables, two times three strides), forms, and the fixed scales."""
    if scales is None:
        return (k_cache, v_cache, x, x, *(0,) * 6), {"k_form": 0, "v_form": 0}, (1.0, 1.0)
    codec, ks, vs = scales.codec, beside(scales.k, k_cache), beside(scales.v, v_cache)
    given = (ks[0], vs[0], tabled(codec.key, x), tabled(codec.value, x), *ks[1:], *vs[1:])
    fixed = codec.scales if codec.key.rule == "fixed" else (1.0, 1.0)
    return given, {"k_form": codec.key.form, "v_form": codec.value.form}, fixed
