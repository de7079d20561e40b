"""Moves experts between ranks, so that each has equal work: decided from how often they are picked, made while steps run.

All ranks see the same counts at the same step, so they decide alike. In each step at most one decision is made, and one expert
begins to come to a rank; the next begins with it."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from penstock.layers.decoder import Decoder
from penstock.layers.experts import Experts
from penstock.observe.log import LOG
from penstock.parallel.group import Group
from penstock.parallel.placement import Move, balancing, exchanges, moved, round_robin
from penstock.worker.rows import Arriving

_EACH = 8
"""The most moves of a layer after one look at the counts."""
_LATER = 3
"""Steps after which the counts of a look are read, when their copy to the host has long ended."""


class Balancing:
    """The experts of one rank's model."""

    def __init__(self, model: Decoder, group: Group, *, spread: bool, interval: int) -> None:
        """`spread`: begin with neighbouring experts apart. `interval`: steps between two looks at the counts; 0: none."""
        self._group, self._interval, self._steps = group, interval, 0
        self._layers = [mixer for block in model.blocks for mixer in block.mixers
                        if isinstance(mixer, Experts) and mixer.held is not None]
        if interval and self._layers:
            # NCCL connects ranks at their first exchange, which takes a quarter of a second.
            group.begin_exchange(self._layers[0].counts.new_zeros(group.size, 1), [1] * group.size, [1] * group.size)()
        self._seen: list[list[int]] | int = 0
        self._looked: Arriving | None = None
        self._planned: Iterator[tuple[Experts, list[Move]]] = self._spread() if spread else iter(())
        self._arrive: Callable[[], None] | None = None
        while self._advance():
            pass

    def step(self) -> None:
        """Called before every step with segments."""
        self._steps += 1
        after = self._steps % self._interval if self._interval and self._layers else -1
        if after == 0 and self._looked is None:
            self._looked = Arriving(self._group.gather(torch.stack([layer.counts for layer in self._layers])).sum(0))
        elif not self._advance() and self._looked is not None and after >= min(_LATER, self._interval - 1):
            counts, self._looked = self._looked.numpy().tolist(), None
            self._seen, self._planned = counts, self._decided((np.array(counts) - self._seen).tolist())

    def _spread(self) -> Iterator[tuple[Experts, list[Move]]]:
        for layer in self._layers:
            assert layer.held is not None
            wanted = round_robin(layer.spec.routing.experts, self._group.size, layer.spec.slots)
            yield from ((layer, moves) for moves in exchanges(layer.held, wanted))

    def _decided(self, news: Sequence[Sequence[int]]) -> Iterator[tuple[Experts, list[Move]]]:
        """Decides as it is asked, so that no step waits for the decisions about all layers."""
        total = 0
        for layer, counts in zip(self._layers, news, strict=True):
            assert layer.held is not None
            for moves in balancing(layer.held, counts, _EACH):
                total += 1
                yield layer, moves
        if total:
            LOG.info("experts are balanced: %d moves in %d layers", total, len(self._layers))

    def _advance(self) -> bool:
        """Makes the moves whose experts were on their way, and sends those of the next. Returns whether there are any."""
        if self._arrive is not None:
            self._arrive()
        found = next(self._planned, None)
        self._arrive = None if found is None else self._begin(*found)
        return found is not None

    def _begin(self, layer: Experts, moves: Sequence[Move]) -> Callable[[], None]:
        """Begins moves that are made at once; the call makes them."""
        group, rank, ranks = self._group, self._group.rank, range(self._group.size)
        own = _memory(layer, next((move.source_slot for move in moves if move.source == rank), 0))
        size = sum(map(len, own))
        sent = [size * sum(move.source == rank != move.rank == other for move in moves) for other in ranks]
        received = [size * sum(move.rank == rank != move.source == other for move in moves) for other in ranks]
        values = {move: torch.cat(_memory(layer, move.source_slot)) for move in moves if move.rank == move.source == rank}
        coming = group.begin_exchange(torch.cat(own)[:sum(sent), None], sent, received)

        def arrive() -> None:
            came = coming()[:, 0]
            for move in moves:
                if move.rank == rank:
                    memory = _memory(layer, move.slot)
                    for part, now in zip(memory, values.get(move, came).split([len(part) for part in memory]), strict=True):
                        part.copy_(now)
            assert layer.held is not None
            layer.hold(moved(layer.held, moves))

        return arrive


def _memory(layer: Experts, slot: int) -> list[torch.Tensor]:
    """Both matrices of the expert in a slot, as bytes."""
    return [*layer.up.matrix(slot), *layer.down.matrix(slot)]
