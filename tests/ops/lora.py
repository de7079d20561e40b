"""Random adapters for the tests of the operation `lora`, and their products in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from penstock.ops.lora import MOST_PIECES, UNIT, Groups, Layout, LoraOps, Matrices, Slabs, padded, size, write
from tests.ops.kernels import close, random


@dataclass
class Case:
    """A projection `path` of a layout, and adapters of these ranks (0: none at that piece), one list a slot."""

    pieces: tuple[int, ...]
    inputs: int
    ranks: list[list[int]]
    most: int
    scaled: tuple[int, ...] = ()
    """Slots with gains."""


CASES = {
    "joined": Case((48, 16, 16), 64, [[3, 3, 3], [16, 0, 16], [0, 0, 0], [20, 32, 5]], 32),
    "odd": Case((37, 5), 29, [[1, 1], [7, 0], [40, 40]], 40, (1,)),
    "long": Case((96,), 1100, [[8], [64], [100]], 100, (0, 2)),
}


class Made:
    """The slabs of a case: a middle target, so that places are not 0."""

    def __init__(self, case: Case, dtype: torch.dtype, device: torch.device) -> None:
        self.case, self.dtype, self.device = case, dtype, device
        self.layout = Layout([("before", (24,), 8), ("it", case.pieces, case.inputs), ("after", (8, 8), 40)])
        self.slabs = Slabs(self.layout, len(case.ranks), case.most, dtype, device)
        self.parts: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        self.gains: dict[int, torch.Tensor] = {}
        for slot, ranks in enumerate(case.ranks):
            self._fill(slot, ranks)

    def _fill(self, slot: int, ranks: list[int]) -> None:
        target, width = self.layout.targets["it"], padded(max(*ranks, 1))
        data = torch.full((self.layout.unit * width,), float("nan"), dtype=self.dtype)
        facts = torch.zeros(self.layout.facts, dtype=torch.int32)
        facts[0] = width
        up = data[target.up * width:(target.up + target.rows) * width].view(width, target.rows)
        at, found = 0, []
        for piece, (rows, rank) in enumerate(zip(target.pieces, ranks, strict=True)):
            a = random(rank, target.inputs, seed=100 * slot + piece).to(self.dtype) / target.inputs ** 0.5
            b = random(rows, rank, seed=100 * slot + piece + 50).to(self.dtype)
            begin = (target.down + piece * target.inputs) * width
            down = data[begin:begin + width * target.inputs].view(width, target.inputs)
            down[:padded(rank)] = 0
            up[:padded(rank), at:at + rows] = 0
            down[:rank], up[:rank, at:at + rows] = a, b.t()
            facts[target.facts + piece] = padded(rank)
            found.append((a, b))
            at += rows
        self.parts.append(found)
        gains = None
        if slot in self.case.scaled:
            gains = torch.zeros(self.layout.gains, dtype=self.dtype)
            self.gains[slot] = random(target.rows, seed=slot).to(self.dtype) / 4
            gains[target.gains:target.gains + target.rows] = self.gains[slot]
            facts[target.facts + MOST_PIECES] = 1
        self.slabs.fill(slot, Matrices(data, [(0, len(data))], gains, facts))

    def groups(self, slots: list[int]) -> Groups:
        rows, count = len(slots), len(self.case.ranks)
        flat = np.full(size(rows, count), -7, np.int32)
        write(flat, np.array(slots, np.int32), rows, count)
        return Groups.of(torch.from_numpy(flat).to(self.device), rows, count)

    def wanted(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, slots: list[int]) -> torch.Tensor:
        """In float64, but for the rounding of x A^T."""
        out, at = out.double().clone(), 0
        for row, slot in enumerate(slots):
            if slot in self.gains:
                base = 0 if bias is None else bias.double()
                out[row] += (out[row] - base) * self.gains[slot].double()
        for piece, rows in enumerate(self.case.pieces):
            for row, slot in enumerate(slots):
                if slot >= 0:
                    a, b = self.parts[slot][piece]
                    out[row, at:at + rows] += b.double() @ (a.double() @ x[row].double()).to(x.dtype).double()
            at += rows
        return out


def check(ops: LoraOps, case: Case, dtype: torch.dtype, rows: int, device: torch.device, biased: bool = False) -> None:
    """A step of so many rows with any slots against float64, and each row's bits against another company."""
    made = Made(case, dtype, device)
    draw = np.random.default_rng(rows)
    slots = draw.integers(-1, len(case.ranks), rows).tolist()
    wide = random(rows, case.inputs + UNIT, dtype=dtype, seed=1)
    x, out = wide[:, :case.inputs], random(rows, sum(case.pieces), dtype=dtype, seed=2)
    bias = random(sum(case.pieces), dtype=dtype, seed=3) if biased else None
    there = None if bias is None else bias.to(device)

    def run(x: torch.Tensor, out: torch.Tensor, slots: list[int]) -> torch.Tensor:
        out, groups = out.clone(), made.groups(slots)
        ops.expand(ops.shrink(x, "it", made.slabs, groups), "it", made.slabs, groups, out, there)
        return out

    x, out = wide.to(device)[:, :case.inputs], out.to(device)
    found = run(x, out, slots)
    close(found.cpu(), made.wanted(x.cpu(), out.cpu(), bias, slots), 1.0, factor=8)
    order = draw.permutation(rows)[:max(1, rows // 3)]
    again = run(x[order], out[order], [slots[i] for i in order])
    assert torch.equal(again, found[order]), "a row's bits depend on its company"


def check_look_up(ops: LoraOps, case: Case, dtype: torch.dtype, rows: int) -> None:
    """An embedding's delta is that of the rows of a unit matrix."""
    made, draw = Made(case, dtype, torch.device("cpu")), np.random.default_rng(rows)
    slots = draw.integers(-1, len(case.ranks), rows).tolist()
    tokens = torch.from_numpy(draw.integers(0, case.inputs, rows)).int()
    groups, out = made.groups(slots), random(rows, sum(case.pieces), dtype=dtype, seed=2)
    found = out.clone()
    ops.expand(ops.look_up(tokens, "it", made.slabs, groups), "it", made.slabs, groups, found, None)
    close(found, made.wanted(torch.eye(case.inputs, dtype=dtype)[tokens.long()], out, None, slots), 1.0, factor=8)
