"""Rows that a recurrence runs over in steps, with drafts that are rejected, beside the recurrence written as a loop."""

from __future__ import annotations

import random as draws
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from penstock.ops.delta import DeltaShape, DeltaState, DeltaWeights
from tests.ops.kernels import random

SHAPES = (DeltaShape(2, 4, 8, 16, 4, 1e-6), DeltaShape(3, 3, 5, 7, 2, 1e-5), DeltaShape(1, 3, 16, 4, 3, 1e-6))
ROWS, PAGE = 4, 8


def weights_of(shape: DeltaShape, device: torch.device, dtype: torch.dtype = torch.float32) -> DeltaWeights:
    plain = (random(shape.key_heads, shape.channels, shape.kernel, seed=1).to(dtype), random(shape.heads, seed=2),
             random(shape.heads, seed=3), 1 + 0.2 * random(shape.value_size, seed=4).to(dtype))
    return DeltaWeights(*(one.to(device) for one in plain))


def looped(x: torch.Tensor, shape: DeltaShape, weights: DeltaWeights) -> torch.Tensor:
    """The results [L, heads, value_size] of one row x [L, ...], in float64, one token and one head at a time."""
    x, found = x.double().cpu(), []
    conv, decay, step, norm = (one.double().cpu() for one in weights)
    dk, dv, shared, unit = shape.key_size, shape.value_size, shape.shared, shape.unit
    for head in range(shape.heads):
        group, place = divmod(head, shared)
        own, after = x[:, group * unit:(group + 1) * unit], x[:, shape.key_heads * unit + group * 2 * shared:]
        picked = [*range(2 * dk), *range(2 * dk + place * dv, 2 * dk + (place + 1) * dv)]
        z = own[:, 2 * dk + (shared + place) * dv:][:, :dv]
        seen = F.pad(own[:, picked], (0, 0, shape.kernel - 1, 0))
        matrix, results = torch.zeros(dk, dv, dtype=torch.float64), []
        for t in range(len(x)):
            q, k, v = F.silu((seen[t:t + shape.kernel].t() * conv[group, picked]).sum(1)).split((dk, dk, dv))
            q, k = (one / (one.square().sum() + 1e-6).sqrt() for one in (q, k))
            matrix = matrix * torch.exp(-decay[head].exp() * F.softplus(after[t, shared + place] + step[head]))
            matrix = matrix + torch.outer(k, torch.sigmoid(after[t, place]) * (v - matrix.t() @ k))
            result = matrix.t() @ q / dk ** 0.5
            results.append(result / (result.square().mean() + shape.eps).sqrt() * norm * F.silu(z[t]))
        found.append(torch.stack(results))
    return torch.stack(found, 1)


class Tape:
    """Rows of random inputs, their pages, and the results that a loop has for them."""

    def __init__(self, shape: DeltaShape, most: int, device: torch.device, dtype: torch.dtype = torch.float32,
                 length: int = 150) -> None:
        self.shape, self.device, self.most, self.length = shape, device, most, length
        self.weights = weights_of(shape, device, dtype)
        self.x = random(ROWS, length, shape.key_heads * (shape.unit + 2 * shape.shared), seed=5).to(dtype).to(device)
        self.wanted = [looped(row, shape, self.weights) for row in self.x]
        columns = -(-length // PAGE)
        pages = ROWS * columns
        self.table = torch.randperm(pages, generator=torch.Generator().manual_seed(6)).view(ROWS, columns).int().to(device)
        # Nobody has written to the pages: what is read of them shows.
        arena = torch.full((pages, 2, shape.heads, shape.key_size, shape.value_size), float("nan"), device=device)
        inputs = torch.full((pages, shape.key_heads, shape.kernel - 1 + most, shape.kept), float("nan"), dtype=dtype,
                            device=device)
        at = torch.full((pages, shape.key_heads), -99, dtype=torch.int32, device=device)
        self.state = DeltaState(arena[:, 1], inputs, at, PAGE)
        self.computed = [0] * ROWS

    def step(self, run: Callable[..., torch.Tensor], segments: Sequence[tuple[int, int, int]], padding: int = 0) -> None:
        """Segments are (row, tokens, how many of them are right); the others are rejected behind it. A result is checked at
        each right token."""
        parts, starts, lengths = [], [0], []
        for row, count, right in segments:
            at = self.computed[row]
            part = self.x[row, at:at + count].clone()
            part[right:] = 3 - part[right:]
            parts.append(part)
            starts.append(starts[-1] + count)
            lengths.append(at + count)
        rows = torch.tensor([row for row, *_ in segments], device=self.device)
        table = torch.nn.functional.pad(self.table[rows], (0, 0, 0, padding))
        x = F.pad(torch.cat(parts), (0, 0, 0, padding), value=float("nan") if padding else 0.0)
        out = run(x, self.shape, self.weights, self.state, table,
                  torch.tensor([*starts, *[starts[-1]] * padding], dtype=torch.int32, device=self.device),
                  torch.tensor([*lengths, *[0] * padding], dtype=torch.int32, device=self.device))
        for (row, _, right), start in zip(segments, starts, strict=False):
            at = self.computed[row]
            found = out[start:start + right].view(right, self.shape.heads, -1).double().cpu()
            wanted = self.wanted[row][at:at + right]
            error = ((found - wanted).abs() / (wanted.abs() + 1)).max().item()
            assert error < (3e-5 if out.dtype is torch.float32 else 3e-2), (row, at, right, error)
            self.computed[row] += right


def follow(tape: Tape, run: Callable[..., torch.Tensor], seed: int, **how: Any) -> int:
    """Steps of any mixture until no row has inputs left. Returns their number."""
    draw, steps = draws.Random(seed), 0
    while True:
        segments = []
        for row in draw.sample(range(ROWS), draw.randint(1, ROWS)):
            left = tape.length - tape.computed[row]
            count = min(left, draw.choice((1, 1, 2, tape.most + 1, tape.most + 2, 9, 70)))
            if count:
                right = draw.randint(1, count) if count <= tape.most + 1 else count
                segments.append((row, count, right))
        if segments:
            tape.step(run, segments, **how)
            steps += 1
        elif min(tape.computed) == tape.length:
            return steps
