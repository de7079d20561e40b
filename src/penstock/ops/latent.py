"""The operations of latent attention (MLA) beside attention itself: the write of latents, and products with a matrix a head."""

from typing import Any

import torch

from penstock.ops.norm import rms_norm
from penstock.ops.rope import rotate
from penstock.ops.table import register


@register("latent_write", "reference", rank=0, capturable=False)
def latent_write(q: torch.Tensor, latent: torch.Tensor, norm: torch.Tensor, eps: float, positions: torch.Tensor,
                 slots: torch.Tensor, cache: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool,
                 out: torch.Tensor) -> None:
    """Writes each token's latent to its cache slot, and the rotated ends of its queries to `out`.

    q [T, H, any + R] and latent [T, D + R], last dimensions contiguous: the last R elements are rotated, as `rope_write` does
    (`interleaved`, cos and sin [max positions, R / 2] float32); the first D of a latent are normed (RMSNorm with weight norm
    [D]), a query's are not. cache [pages, 1, page, D + R]; slots [T] int64: page id x page size + offset, or -1 for padding, of
    which nothing is written. out [T, H, D + R]: its last R elements are written. q and latent are not changed."""
    at, turned, width = positions.long(), 2 * cos.shape[1], norm.shape[0]
    c, s = cos[at], sin[at]
    out[..., width:] = rotate(q[..., -turned:], c, s, interleaved)
    size, kept = cache.shape[2], slots >= 0
    page, inside = slots[kept] // size, slots[kept] % size
    cache[page, 0, inside, :width] = rms_norm(latent[:, :width], norm, eps)[kept].to(cache.dtype)
    cache[page, 0, inside, width:] = rotate(latent[:, None, width:], c, s, interleaved)[kept, 0].to(cache.dtype)


@register("head_linear", "reference", rank=0, batch_invariant=False, threads=True)
class HeadLinearOps:
    """Products with one matrix a head. The reference; an implementation has these two functions."""

    @staticmethod
    def pack(weight: torch.Tensor) -> Any:
        """Takes [H, K, N] of any strides, in the model's dtype, to the layout that `apply` reads."""
        return weight

    @staticmethod
    def apply(x: torch.Tensor, weight: Any, out: torch.Tensor) -> None:
        """out [T, H, N] = x [T, H, K] times the head's matrix, in x's dtype; of any strides, the last 1. Sums are float32."""
        out.copy_(torch.bmm(x.transpose(0, 1), weight).transpose(0, 1))
