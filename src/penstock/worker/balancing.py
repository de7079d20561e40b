"""Moves experts between ranks, so that each has equal work: decided from how often they are picked, carried out between steps.

All ranks see the same counts before the same plan, so they decide and move the same. Every step makes a few moves at most."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from penstock.layers.decoder import Decoder
from penstock.layers.experts import Experts
from penstock.observe.log import LOG
from penstock.parallel.group import Group
from penstock.parallel.placement import Move, balancing, exchanges, moved, round_robin

_MOVES = 4
"""The most moves of one step."""
_EACH = 8
"""The most moves of a layer after one look at the counts."""


class Balancing:
    """The experts of one rank's model."""

    def __init__(self, model: Decoder, group: Group, *, spread: bool, interval: int) -> None:
        """`spread`: begin with neighbouring experts on different ranks. `interval`: look at the counts once in so many steps;
        0: never."""
        self._group, self._interval, self._steps = group, interval, 0
        self._layers = [mixer for block in model.blocks for mixer in block.mixers
                        if isinstance(mixer, Experts) and mixer.held is not None]
        self._seen = [0] * len(self._layers) * (self._layers[0].spec.routing.experts if self._layers else 0)
        self._waiting: deque[tuple[Experts, list[Move]]] = deque()
        for layer in self._layers if spread else ():
            assert layer.held is not None
            wanted = round_robin(layer.spec.routing.experts, group.size, layer.spec.slots)
            for moves in exchanges(layer.held, wanted):
                self._move(layer, moves)

    def step(self) -> None:
        """Called before every step with segments."""
        self._steps += 1
        for _ in range(min(_MOVES, len(self._waiting))):
            self._move(*self._waiting.popleft())
        if self._interval and not self._waiting and self._steps % self._interval == 0 and self._layers:
            self._decide()

    def _decide(self) -> None:
        counts = self._group.gather(torch.stack([layer.counts for layer in self._layers])).sum(0).flatten().tolist()
        news = [now - before for now, before in zip(counts, self._seen, strict=True)]
        self._seen = counts
        size = len(news) // len(self._layers)
        for i, layer in enumerate(self._layers):
            assert layer.held is not None
            self._waiting += [(layer, moves) for moves in balancing(layer.held, news[i * size:(i + 1) * size], _EACH)]
        if self._waiting:
            LOG.info("experts are balanced: %d moves in %d layers", len(self._waiting), len(self._layers))

    def _move(self, layer: Experts, moves: Sequence[Move]) -> None:
        """Makes moves at once: no source is overwritten before it is read."""
        rank, found = self._group.rank, dict[Move, torch.Tensor]()
        if any(move.rank != move.source for move in moves):
            mine = next((move.source_slot for move in moves if move.source == rank), 0)
            everyones = self._group.gather(torch.cat(_memory(layer, mine)))
            found = {move: everyones[move.source] for move in moves if move.rank == rank}
        else:
            found = {move: torch.cat(_memory(layer, move.source_slot)) for move in moves if move.rank == rank}
        for move, values in found.items():
            memory = _memory(layer, move.slot)
            for part, now in zip(memory, values.split([len(part) for part in memory]), strict=True):
                part.copy_(now)
        assert layer.held is not None
        layer.hold(moved(layer.held, moves))


def _memory(layer: Experts, slot: int) -> list[torch.Tensor]:
    """Both matrices of the expert in a slot, as bytes."""
    return [*layer.up.matrix(slot), *layer.down.matrix(slot)]
