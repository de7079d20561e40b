"""Triton's rope_write against the reference in float64: every option, strided views, padding; interpreted without a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from penstock.ops.rows_triton import rope_write
from tests.ops.interpreter import DEVICE, DTYPES
from tests.ops.kernels import close, random, reference


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    size: int
    half: int
    """Pairs of numbers that turn; 0 for no positions."""
    norm: bool
    offset: float = 0.0
    page: int = 16
    tokens: int = 5
    interleaved: bool = False


CASES = [
    Case(32, 8, 128, 64, True), Case(4, 4, 64, 32, False), Case(3, 1, 256, 128, True, 1.0, page=8), Case(6, 2, 80, 16, False),
    Case(5, 5, 96, 48, True), Case(2, 1, 72, 0, False), Case(2, 2, 128, 0, True), Case(7, 1, 48, 9, True, 1.0, page=5),
    Case(1, 1, 37, 3, True, tokens=1), Case(4, 2, 48, 24, True, interleaved=True), Case(3, 1, 80, 9, False, interleaved=True),
    Case(9, 3, 112, 56, False, tokens=40),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rope_write(case: Case, dtype: torch.dtype) -> None:
    heads, kv_heads, size = case.heads, case.kv_heads, case.size
    qkv = random(case.tokens, heads + 2 * kv_heads, size, seed=1).to(dtype).to(DEVICE)
    q, k, v = qkv[:, :heads], qkv[:, heads:heads + kv_heads], qkv[:, heads + kv_heads:]
    generator = torch.Generator().manual_seed(2)
    positions = torch.randint(0, 60, (case.tokens,), generator=generator).int().to(DEVICE)
    slots = torch.randperm(7 * case.page, generator=generator)[:case.tokens].to(DEVICE)
    slots[case.tokens // 2:case.tokens // 2 + (case.tokens > 1)] = -1
    angles = 3 * random(60, case.half, seed=3).to(DEVICE)
    table = (angles.cos(), angles.sin()) if case.half else (None, None)
    norms = tuple(random(size, seed=seed).to(dtype).to(DEVICE) for seed in (4, 5)) if case.norm else (None, None)
    # Pages of several layers interleaved, as the arena has them; what is not written must stay.
    arena = random(7, 3, kv_heads, case.page, size, seed=6).to(dtype).to(DEVICE)
    before, caches = arena.clone(), (arena[:, 0], arena[:, 1])
    wide = [cache.double() for cache in caches]
    kept = qkv.clone()

    found = rope_write(q, k, v, positions, slots, *caches, *table, *norms, 1e-5, case.offset, case.interleaved)

    wanted = reference("rope_write")(q.double(), k.double(), v.double(), positions, slots, *wide, *table, *norms, 1e-5,
                                     case.offset, case.interleaved)
    close(found, wanted, factor=2)
    assert found.is_contiguous() and torch.equal(qkv, kept)
    close(caches[0], wide[0], factor=2)
    assert torch.equal(caches[1], wide[1].to(dtype)), "values are copied, not computed"
    assert torch.equal(arena[:, 2], before[:, 2])
    touched = torch.zeros(7 * case.page, dtype=torch.bool, device=DEVICE)
    touched[slots[slots >= 0]] = True
    still = ~touched.view(7, 1, case.page, 1).expand_as(caches[0])
    assert torch.equal(caches[0][still], before[:, 0][still]), "slots that no token has are untouched"
