"""The step builder on NVIDIA GPUs: tokens, positions, slots and block tables of all cache groups in one kernel launch."""

import torch

from penstock.ops import gpu
from penstock.ops.step import StepTensors
from penstock.ops.table import register

_BLOCK = 128
"""Tokens a program."""
_PIECES = 4
"""The most programs that share a row of a block table."""


@register("build_step", "triton", rank=10, supports=gpu.supports)
def build_step(known: torch.Tensor, tables: list[torch.Tensor], row: torch.Tensor, start: torch.Tensor,
               query_start: torch.Tensor, page: int, tokens: int, columns: int) -> StepTensors:
    """Block table entries beyond a segment's context are left uninitialised."""
    from penstock.ops.step_kernel import build_step as kernel  # Triton: heavy, and not everywhere

    device, segments = known.device, len(row)
    # Each output begins at a multiple of 64 bytes, whatever the step: alignment is part of what kernels are compiled for.
    flat, cut_row = -(-tokens // 16) * 16, -(-columns // 16) * 16
    ids = torch.empty(2, flat, dtype=torch.int32, device=device)
    slots = torch.empty(len(tables), flat, dtype=torch.int64, device=device)
    cut = torch.empty(len(tables), segments, cut_row, dtype=torch.int32, device=device)
    stride = tables[0].stride(0)
    assert all(table.stride() == (stride, 1) for table in tables), "tables of one shape, rows contiguous"
    # By the longest possible context, not this step's: otherwise every length would compile its own kernel.
    wide = max(128, gpu.covering(-(-tables[0].shape[1] // _PIECES)))
    pieces = -(-columns // wide)
    linked = gpu.linked(device)
    kernel[(-(-tokens // _BLOCK) + segments * pieces,)](
        known, row, start, query_start, tuple(tables), ids[0], ids[1], tuple(cut.unbind()), tuple(slots.unbind()),
        segments, tokens, columns, segments.bit_length(), pieces, known.stride(0), stride, cut_row, page=page, block=_BLOCK,
        wide=wide, linked=linked, num_warps=4, launch_pdl=linked)
    return StepTensors(ids[0, :tokens], ids[1, :tokens], [table[:, :columns] for table in cut], [s[:tokens] for s in slots])
