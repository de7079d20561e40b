"""Embedding look-up on NVIDIA GPUs.

Never uses programmatic dependent launch: kernels after it rely on all before it having ended (ops/rope_triton.py does)."""

import torch

from penstock.ops.gpu import covering

_BLOCK = 2048


def gather(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows `ids` [T] (int32 or int64) of the contiguous `table` [N, K]: [T, K]. Ids outside of the table are not checked."""
    from penstock.ops.gather_kernel import gather as kernel  # Triton: heavy, and not everywhere

    rows, width = len(ids), table.shape[1]
    out = torch.empty(rows, width, dtype=table.dtype, device=table.device)
    if rows == 0:
        return out
    block = min(_BLOCK, covering(width))
    kernel[(rows, -(-width // block))](ids, table, out, width=width, block=block,
                                       num_warps=max(1, min(8, block * table.element_size() // 512)))
    return out
