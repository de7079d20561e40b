"""Triton's operations of latent attention against the references; interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.ops.interpreter import DEVICE, DTYPES  # isort: skip  (before Triton's kernels are imported)

from penstock.ops.rows_triton import InvariantHeadLinear, LibraryHeadLinear, latent_write
from tests.ops.kernels import close, random, reference


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens, heads, size, width, half, page", [
    (5, 16, 192, 512, 32, 16), (3, 5, 19, 20, 3, 4), (1, 40, 24, 64, 8, 8)])
def test_latent_write(tokens: int, heads: int, size: int, width: int, half: int, page: int, interleaved: bool,
                      dtype: torch.dtype) -> None:
    q, joined = random(tokens, heads, size, seed=1).to(dtype).to(DEVICE), random(tokens, 9 + width + 2 * half, seed=2).to(dtype)
    latent, norm = joined.to(DEVICE)[:, 9:], random(width, seed=3).to(dtype).to(DEVICE)
    positions, slots = torch.arange(tokens).int().to(DEVICE) * 3, torch.randperm(5 * page)[:tokens].to(DEVICE)
    slots[tokens // 2] = -1
    angles = 3 * random(60, half, seed=4).to(DEVICE)
    arena = random(5, 2, 1, page, width + 2 * half, seed=5).to(dtype).to(DEVICE)
    wide, out = arena.double(), torch.zeros(tokens, heads, width + 2 * half, dtype=dtype, device=DEVICE)
    exact = out.double()
    latent_write(q, latent, norm, 1e-6, positions, slots, arena[:, 1], angles.cos(), angles.sin(), interleaved, out)
    reference("latent_write")(q.double(), latent.double(), norm.double(), 1e-6, positions, slots, wide[:, 1], angles.cos(),
                              angles.sin(), interleaved, exact)
    close(out, exact, factor=2)
    close(arena, wide, factor=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ops", [LibraryHeadLinear, InvariantHeadLinear])
def test_head_linear(ops: type[LibraryHeadLinear], dtype: torch.dtype) -> None:
    for tokens, heads, k, n in ((1, 2, 128, 512), (21, 3, 20, 70)):
        wide = random(tokens, heads, k + 8, seed=tokens).to(dtype).to(DEVICE)
        x, weight = wide[..., :k], random(heads, n, k, seed=2).to(dtype).to(DEVICE).transpose(1, 2)
        out, exact = (torch.zeros(tokens, heads, n + 8, dtype=kind, device=DEVICE) for kind in (dtype, torch.float32))
        ops.apply(x, ops.pack(weight), out[..., :n])
        reference("head_linear").apply(x.float(), weight.float(), exact[..., :n])
        close(out, exact, k ** 0.5, 2.0)
