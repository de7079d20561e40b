"""Query and key norms, rotation and the cache write on NVIDIA GPUs, in one launch."""

import torch

from penstock.ops import gpu
from penstock.ops.table import register

_NUMBERS = {64: 2048, 128: 2048, 256: 1024}
"""Elements per program by padded head size: the fastest at one token and at 8192 (bench/gpu_rows.py)."""
_EARLY = True
"""Read positions, slots and tables before waiting for the previous kernel. They were written before the embedding's kernel,
which is launched without programmatic dependent launch and so starts only when everything before it has ended."""


@register("rope_write", "triton", rank=10, supports=gpu.supports)
def rope_write(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, positions: torch.Tensor, slots: torch.Tensor | None,
               k_cache: torch.Tensor, v_cache: torch.Tensor | None, cos: torch.Tensor | None = None,
               sin: torch.Tensor | None = None,
               q_norm: torch.Tensor | None = None, k_norm: torch.Tensor | None = None, eps: float = 1e-6,
               offset: float = 0.0, interleaved: bool = False) -> torch.Tensor:
    from penstock.ops.rope_kernel import rope_write as kernel  # Triton: heavy, and not everywhere

    tokens, heads, size = q.shape
    kv_heads = k.shape[1]
    out = torch.empty(tokens, heads, size, dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    half = 0 if cos is None else cos.shape[1]
    whole = gpu.covering(size)
    many = max(1, min(gpu.covering(heads), _NUMBERS.get(whole, 1024) // whole))
    warps = min(8, max(1, many * whole // 512))
    linked = gpu.linked(q.device)
    kernel[(tokens, -(-heads // many) - (-kv_heads // many))](
        q, k, v, positions, slots, k_cache, v_cache, cos, sin, q_norm, k_norm, out, float(eps), float(offset),
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), *((0, 0) if v is None else v.stride()[:2]),
        *k_cache.stride()[:3], *((0, 0, 0) if v_cache is None else v_cache.stride()[:3]), heads=heads,
        kv_heads=kv_heads, size=size, page=k_cache.shape[2],
        half=half, near=gpu.covering(half), far=gpu.covering(size - 2 * half), whole=whole, many=many, linked=linked,
        early=_EARLY, interleaved=interleaved, num_warps=warps, launch_pdl=linked)
    return out
