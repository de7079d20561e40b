"""Query and key norms, rotary position embedding and the write into the paged cache: one fused operation."""

import torch

from penstock.ops.norm import rms_norm
from penstock.ops.table import register


@register("rope_write", "reference", rank=0, capturable=False)
def rope_write(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, positions: torch.Tensor, slots: torch.Tensor | None,
               k_cache: torch.Tensor, v_cache: torch.Tensor | None, cos: torch.Tensor | None = None,
               sin: torch.Tensor | None = None, q_norm: torch.Tensor | None = None, k_norm: torch.Tensor | None = None,
               eps: float = 1e-6, offset: float = 0.0, interleaved: bool = False) -> torch.Tensor:
    """Norms and rotates q and k, writes k and v into their cache slots, returns the new q [T, H, D] contiguous.

    q [T, H, D], k and v [T, KV, D]: views with contiguous last dimension. positions [T] int32. slots [T] int64: page id x page
    size + offset, -1 for padding, which is not written. k_cache, v_cache [pages, KV, page, D], any strides but the last. cos,
    sin [max positions, R / 2] float32 for the first R dimensions of a head, in two halves (Su et al. 2021, in the GPT-NeoX
    order), or `interleaved` (GPT-J's order); None leaves positions out. q_norm, k_norm [D]: RMSNorm weights a head, before
    rotation. k and v are not changed. Without v, values are not written; without slots, token t is written to slot t."""
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps, offset)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps, offset)
    if cos is not None and sin is not None:
        at = positions.long()
        q, k = (rotate(x, cos[at], sin[at], interleaved) for x in (q, k))
    size = k_cache.shape[2]
    slots = torch.arange(len(q), device=q.device) if slots is None else slots
    kept = slots >= 0
    page, inside = slots[kept] // size, slots[kept] % size
    k_cache[page, :, inside] = k[kept].to(k_cache.dtype)
    if v is not None and v_cache is not None:
        v_cache[page, :, inside] = v[kept].to(v_cache.dtype)
    return q.contiguous()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """x [T, H, D] with its first R elements rotated by cos, sin [T, R / 2]."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    turned, rest = x[..., :2 * half].float(), x[..., 2 * half:]
    left, right = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    found = left * cos - right * sin, right * cos + left * sin
    turned = (torch.stack(found, -1).flatten(-2) if interleaved else torch.cat(found, -1)).to(x.dtype)
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned
