"""The axes of parallelism and each rank's place on them. Uses no tensors, so that engine and options can read it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product


@dataclass(frozen=True)
class Place:
    """One rank's place: rank `tensor` of the `tensors` that divide every layer of stage `stage` of `stages` among them."""

    tensor: int = 0
    tensors: int = 1
    rendezvous: str = ""
    """The folder (private to the user) through which the ranks of one machine find each other; of several tcp://HOST:PORT."""
    stage: int = 0
    stages: int = 1
    layers: tuple[int, ...] = ()
    """Blocks of each stage; empty: divided by size."""
    experts: bool = False
    """Ranks divide the experts of a mixture, not the channels of each."""
    spare: int = 0
    """Experts for which each rank has room besides its share."""
    data: int = 0
    datas: int = 1
    """Engines that step together: each has its own requests, and some of the experts for all."""
    context: int = 0
    contexts: int = 1
    """Ranks with equal weights that divide the positions of every cached page among them."""

    @property
    def width(self) -> int:
        """Ranks of a stage."""
        return self.tensors * self.contexts

    @property
    def within(self) -> int:
        """Its number among the ranks of its stage."""
        return self.context * self.tensors + self.tensor

    @property
    def rank(self) -> int:
        """Its number among the ranks of its engine: stage by stage."""
        return self.stage * self.width + self.within

    @property
    def ranks(self) -> int:
        return self.stages * self.width

    @property
    def number(self) -> int:
        """Its number in the world: engine by engine."""
        return self.data * self.ranks + self.rank

    @property
    def world(self) -> int:
        return self.datas * self.ranks

    @property
    def alone(self) -> bool:
        return self.world == 1


ALONE = Place()
"""The only rank."""


def places(whole: Place) -> Iterator[Place]:
    """Every rank's place in the order of their numbers, given that of one."""
    for stage, context, tensor in product(range(whole.stages), range(whole.contexts), range(whole.tensors)):
        yield replace(whole, stage=stage, context=context, tensor=tensor)


def runs(weights: Sequence[int], last: int, stages: int) -> list[int]:
    """Blocks of each of the stages, such that the heaviest stage is as light as possible. `weights`: of each block; `last`: of
    what the last stage has besides. Every stage has a block."""
    count = len(weights)
    sums = list(accumulate(weights, initial=0))
    # best[n]: (the heaviest stage, its blocks) of the first n blocks in the stages so far.
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for stage in range(stages):
        more = last if stage == stages - 1 else 0
        best = {n: min((max(heaviest, sums[n] - sums[before] + more), [*found, n - before])
                       for before, (heaviest, found) in best.items() if before < n)
                for n in range(stage + 1, count - (stages - stage - 1) + 1)}
    return best[count][1]
