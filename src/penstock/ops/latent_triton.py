"""The write of latents, and products with a matrix a head, on NVIDIA GPUs."""

import torch

from penstock.ops import gpu
from penstock.ops.latent import HeadLinearOps
from penstock.ops.table import register


@register("latent_write", "triton", rank=10, supports=gpu.supports)
def latent_write(q: torch.Tensor, latent: torch.Tensor, norm: torch.Tensor, eps: float, positions: torch.Tensor,
                 slots: torch.Tensor, cache: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool,
                 out: torch.Tensor) -> None:
    from penstock.ops.latent_kernel import latent_write as kernel  # Triton: heavy, and not everywhere

    tokens, heads, size = q.shape
    half, width = cos.shape[1], norm.shape[0]
    if tokens == 0:
        return
    many = min(16, gpu.covering(heads))
    linked = gpu.linked(q.device)
    kernel[(tokens, 1 - (-heads // many))](
        q, latent, norm, positions, slots, cache, cos, sin, out, float(eps), q.stride(0), q.stride(1), latent.stride(0),
        cache.stride(0), cache.stride(2), out.stride(0), out.stride(1), heads=heads, start=size - 2 * half, width=width,
        half=half, page=cache.shape[2], interleaved=interleaved, many=many, near=gpu.covering(half), wide=gpu.covering(width),
        linked=linked, num_warps=4, launch_pdl=linked)


@register("head_linear", "library", rank=10, supports=gpu.supports, batch_invariant=False)
class LibraryHeadLinear(HeadLinearOps):
    """A vendor library's batched GEMM, which reads and writes strided tensors."""

    @staticmethod
    def apply(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))


@register("head_linear", "triton-invariant", rank=5, supports=gpu.supports)
class InvariantHeadLinear(HeadLinearOps):
    """Tiles of one size whatever the number of tokens, so that a row's bits depend on the row alone."""

    @staticmethod
    def apply(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        from penstock.ops.latent_kernel import head_linear as kernel  # as above

        tokens, heads, k = x.shape
        n = weight.shape[2]
        if tokens == 0:
            return
        linked = gpu.linked(x.device)
        kernel[(-(-tokens // 16), heads, -(-n // 64))](
            x, weight, out, tokens, x.stride(0), x.stride(1), weight.stride(0), weight.stride(1), weight.stride(2),
            out.stride(0), out.stride(1), n=n, k=k, block_m=16, block_n=64, block_k=64, linked=linked, num_warps=4,
            launch_pdl=linked)
