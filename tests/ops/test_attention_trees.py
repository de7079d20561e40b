"""Attention of draft trees: each query sees its context and its ancestors, in every implementation."""

from __future__ import annotations

import pytest
import torch

from penstock.ops import registry
from penstock.ops.attention import AttentionOps, Tree
from penstock.platform.facts import detect

PAGE, HEADS, KV, SIZE = 16, 4, 2, 32
ORIGINS = [37, 1 << 30, 64, 500, 9]
PARENTS = [-1, -1, 0, 0, 1, 2, 2, 5, 4]
"""Of each draft of a tree."""


def _bits() -> list[int]:
    found: list[int] = []
    for at, parent in enumerate(PARENTS):
        found.append((1 << at) | (found[parent] if parent >= 0 else 0))
    return found


def _implementations() -> dict[str, AttentionOps]:
    return {"reference": AttentionOps(), "host": registry.bind(detect("cpu"), torch.float32).attention}


def case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Tree]:
    """Segments that verify trees, one of an ordinary prompt, and one that is the second level of a tree."""
    draw = torch.Generator().manual_seed(0)
    counts = [1 + len(PARENTS), 70, 1 + len(PARENTS), 1 + len(PARENTS), 3]
    context = [37 + len(PARENTS), 70, 64 + len(PARENTS), 500 + len(PARENTS), 9 + 5]
    bits = []
    for segment, count in enumerate(counts):
        bits += [0] * count if segment == 1 else [0, *_bits()] if segment < 4 else [0b00101, 0b01001, 0b10010]
    columns = -(-max(context) // PAGE)
    table = torch.randperm(len(counts) * columns, generator=draw).int().view(len(counts), columns)
    k, v = (torch.randn(len(counts) * columns, KV, PAGE, SIZE, generator=draw) for _ in range(2))
    q = torch.randn(sum(counts), HEADS, SIZE, generator=draw)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    tree = Tree(torch.tensor(ORIGINS, dtype=torch.int32), torch.tensor(bits))
    return q, k, v, table, starts, torch.tensor(context, dtype=torch.int32), tree


def expected() -> torch.Tensor:
    q, k, v, table, starts, context, tree = case()
    out = torch.empty_like(q)
    for segment, length in enumerate(context.tolist()):
        lo, hi = starts[segment:segment + 2].tolist()
        keys, values = (x[table[segment].long()].transpose(0, 1).flatten(1, 2)[:, :length] for x in (k, v))
        for query in range(lo, hi):
            position = length - (hi - query)
            seen = [key for key in range(position + 1)
                    if key < ORIGINS[segment] or int(tree.bits[query]) >> (key - ORIGINS[segment]) & 1]
            scores = torch.einsum("gnd,gkd->gnk", q[query].view(KV, -1, SIZE), keys[:, seen]) * SIZE ** -0.5
            out[query] = torch.einsum("gnk,gkd->gnd", scores.softmax(-1), values[:, seen]).flatten(0, 1)
    return out


@pytest.mark.parametrize("name", ["reference", "host"])
def test_queries_see_their_ancestors_alone(name: str) -> None:
    *given, tree = case()
    attention = _implementations()[name]
    torch.testing.assert_close(attention.apply(*given, SIZE ** -0.5, tree=tree), expected(), atol=2e-5, rtol=2e-5)
    assert not torch.allclose(attention.apply(*given, SIZE ** -0.5), expected(), atol=1e-3)


def test_the_hosts_kernel_gives_a_path_the_bits_of_a_chain() -> None:
    """Also where the tree, but not the path, reaches into the next block of keys."""
    q, k, v, table, starts, context, tree = case()
    attention = _implementations()["host"]
    found = attention.apply(q, k, v, table, starts, context, SIZE ** -0.5, tree=tree)
    path = [0, 2, 5, 7]
    for segment in (0, 2, 3):
        first, keys, values = ORIGINS[segment], k.clone(), v.clone()
        for to, source in enumerate(path):
            for moved, x in ((keys, k), (values, v)):
                moved[table[segment, (first + to) // PAGE], :, (first + to) % PAGE] = \
                    x[table[segment, (first + source) // PAGE], :, (first + source) % PAGE]
        lo = int(starts[segment])
        rows = [lo, *(lo + 1 + at for at in path)]
        numbers = torch.tensor([0, len(rows), first + len(path)], dtype=torch.int32)
        chain = attention.apply(q[rows], keys, values, table[segment:segment + 1], numbers[:2], numbers[2:], SIZE ** -0.5)
        assert torch.equal(found[rows], chain)

