"""The ranks of an engine: starts them, and combines several into one. Knows only the interface of a rank.

Ranks are imported by name at run time, because the engine's half must not import torch and a rank may run in another process.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Protocol, cast

from penstock.config.resolve import EngineConfig
from penstock.config.schema import EngineOptions
from penstock.core.layout import CacheLayout
from penstock.core.plan import Masks, StepPlan, StepResult
from penstock.core.rank import Loaded, Prepared, Survey
from penstock.engine.executor import Begun, Launches
from penstock.stores.behind import Behind

RANK = "penstock.worker.rank:Rank"
"""The class that makes a rank from options."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) while weights load."""


class Rank(Launches, Protocol):
    """One device's half of the engine: `worker/rank.py::Rank`, a fake, or a RankGroup."""

    def survey(self) -> Survey: ...

    def check(self, config: EngineConfig) -> None: ...

    def load(self, progress: Progress | None = None) -> Loaded: ...

    def prepare(self, layout: CacheLayout, max_model_len: int, behind: Behind | None) -> Prepared: ...

    def close(self) -> None:
        """Frees everything that the rank has allocated. May be called at any time, and repeatedly."""
        ...


def make_rank(options: EngineOptions, name: str = RANK) -> Rank:
    """A rank of this process. ConfigError if its device cannot be used."""
    module, _, attribute = name.partition(":")
    return cast(Rank, getattr(importlib.import_module(module), attribute)(options))


class RankGroup:
    """Several ranks as one: each runs every plan, and the first rank's results are used.

    Memory is planned for the smallest rank. If one rank fails, the group fails.
    """

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.ranks = list(ranks)

    def survey(self) -> Survey:
        first, *others = [rank.survey() for rank in self.ranks]
        for other in others:
            assert replace(other, device=first.device) == first, "ranks of one engine have the same model"
        return first

    def check(self, config: EngineConfig) -> None:
        for rank in self.ranks:
            rank.check(config)

    def load(self, progress: Progress | None = None) -> Loaded:
        """Loads every rank. Returns the smallest room, and the largest memory use of weights and steps, of all ranks."""
        found = [rank.load(progress if rank is self.ranks[0] else None) for rank in self.ranks]
        first = found[0]
        assert all(other.states == first.states and other.computation == first.computation for other in found)
        return replace(first, room=min(one.room for one in found), weight_bytes=max(one.weight_bytes for one in found),
                       step_bytes=max(one.step_bytes for one in found), graph_bytes=max(one.graph_bytes for one in found),
                       notes=list(dict.fromkeys(note for one in found for note in one.notes)))

    def prepare(self, layout: CacheLayout, max_model_len: int, behind: Behind | None) -> Prepared:
        assert behind is None, "pages behind the device know no ranks yet"
        first, *_ = [rank.prepare(layout, max_model_len, None) for rank in self.ranks]
        return first

    def launch(self, plan: StepPlan) -> Begun:
        return _Together([rank.launch(plan) for rank in self.ranks], self.agree)

    def agree(self, results: Sequence[StepResult]) -> StepResult:
        """The result of a step, given the results of all ranks."""
        return results[0]

    def close(self) -> None:
        with ExitStack() as closing:
            for rank in self.ranks:
                closing.callback(rank.close)


class _Together:
    """An in-flight step of several ranks."""

    def __init__(self, pending: Sequence[Begun], agree: Callable[[Sequence[StepResult]], StepResult]) -> None:
        self._pending = pending
        self._agree = agree

    def choose(self, masks: Masks) -> None:
        for one in self._pending:
            one.choose(masks)

    def result(self) -> StepResult:
        return self._agree([one.result() for one in self._pending])
