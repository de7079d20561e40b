"""Experts that move while steps run: no step waits for all of them, and none is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch

from penstock.layers.experts import Experts
from penstock.parallel.placement import Held, linear
from penstock.worker.balancing import Balancing
from tests.system.ranks import Shared, Threads

EXPERTS, LAYERS, STEP, TRANSFER = 16, 3, 0.02, 0.014


class Slow(Threads):
    """Experts take a while to come, during which a rank may do something else."""

    def begin_exchange(self, x: torch.Tensor, sent: list[int], received: list[int]) -> Callable[[], torch.Tensor]:
        arrived, until = super().begin_exchange(x.clone(), sent, received), time.monotonic() + TRANSFER
        return lambda: (time.sleep(max(0.0, until - time.monotonic())), arrived())[1]


class Layer(Experts):
    """Memory of experts alone; each one's says which it is."""

    def __init__(self, rank: int, layer: int) -> None:
        slots = EXPERTS // 2 + 1
        self.held: Held | None = linear(EXPERTS, 2, slots)
        self.spec = SimpleNamespace(routing=SimpleNamespace(experts=EXPERTS), slots=slots)  # type: ignore[assignment]
        self.counts = torch.zeros(EXPERTS, dtype=torch.int64)
        self.memory = torch.tensor([[expert + layer] * 8 for expert in self.held[rank]]).to(torch.uint8)
        self.up = self.down = SimpleNamespace(matrix=lambda slot: [self.memory[slot]])  # type: ignore[assignment]

    def hold(self, held: Held) -> None:
        self.held = held


def test_no_step_is_longer_than_two_while_experts_move() -> None:
    shared, meeting = Shared(2), threading.Barrier(2, timeout=60)

    def rank(number: int) -> tuple[list[Held], float]:
        layers = [Layer(number, layer) for layer in range(LAYERS)]
        model: Any = SimpleNamespace(blocks=[SimpleNamespace(mixers=layers)])
        found, longest, seen = Balancing(model, Slow(number, shared), spread=False, interval=8), 0.0, list[Held]()
        for step in range(48):
            began = time.monotonic()
            # Mostly the first rank's experts are picked, some far more often than others.
            for layer in layers:
                layer.counts += torch.tensor([100 // (1 + expert) for expert in range(EXPERTS)])
            found.step()
            meeting.wait()
            time.sleep(STEP)
            if step > 1:
                longest = max(longest, time.monotonic() - began)
            for place, layer in enumerate(layers):
                assert layer.held is not None
                held = [expert for expert in layer.held[number] if expert >= 0]
                assert [int(layer.memory[slot, 0]) - place for slot in range(len(held))] == held
                assert {expert for line in layer.held for expert in line} >= set(range(EXPERTS))
                seen.append(layer.held)
        return seen, longest

    with ThreadPoolExecutor(2) as pool:
        (one, first), (other, second) = pool.map(rank, range(2))
    assert one == other and len(set(one)) >= 4
    assert max(first, second) < 2 * STEP + 0.01, (first, second)
