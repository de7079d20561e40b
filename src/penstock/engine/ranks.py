"""The ranks of an engine: the interface of one, and several as one."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from penstock.config.resolve import EngineConfig
from penstock.core.errors import ConfigError
from penstock.core.plan import Ints, LoadResult, StepResult, WriteResult
from penstock.core.rank import Loaded, Prepared, Survey
from penstock.core.state import CacheLayout
from penstock.engine.executor import Launches
from penstock.stores.opening import Opening

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) while weights load."""


class Rank(Launches, Protocol):
    """One device's half of the engine: `worker/rank.py::Rank`, a RemoteRank, a fake, or a RankGroup."""

    @property
    def overlaps(self) -> bool:
        """Whether `launch` returns without waiting for the device."""

    def survey(self) -> Survey: ...

    def check(self, config: EngineConfig) -> None: ...

    def load(self, progress: Progress | None = None) -> Loaded: ...

    def prepare(self, layout: CacheLayout, max_model_len: int, opening: Opening | None) -> Prepared: ...

    def mask_room(self, lines: int, words: int) -> Ints: ...

    def look(self) -> None:
        """Raises EngineDeadError if the rank is lost."""

    def add_adapter(self, folder: str) -> str: ...

    def drop_adapter(self, name: str) -> None: ...

    def start_profile(self) -> None: ...

    def stop_profile(self, folder: str) -> list[str]: ...

    def close(self) -> None:
        """Frees everything that the rank has allocated. May be called at any time, and repeatedly."""


Found = TypeVar("Found")


class RankGroup(ABC):
    """Several ranks as one: each runs every plan, and the results of the last pipeline stage's first rank are used.

    Memory is planned for the smallest rank. If one rank fails, the group fails."""

    def __init__(self, ranks: list[Any], last: int = 0) -> None:
        """`last`: the number of the last pipeline stage; the ranks come stage by stage."""
        self.ranks = ranks
        self._stages = last + 1
        self._picks: dict[int, npt.NDArray[np.int64]] = {}
        """By pipeline stage, what its experts were asked for."""
        self._loads: dict[int, list[LoadResult]] = {}
        self._writes: dict[int, list[WriteResult]] = {}
        self.seconds: npt.NDArray[np.float64] = np.zeros(1)
        """Of the steps so far, by rank."""

    def mask_room(self, lines: int, words: int) -> Ints:
        return np.empty((lines, words), np.int32)

    def survey(self) -> Survey:
        first, *others = self._each("survey")
        for number, other in enumerate(others, 1):
            its, own = ([text for text in one if text not in two] for one, two in (
                (other.alike, first.alike), (first.alike, other.alike)))
            if its:
                raise ConfigError(f"rank {number} was started with {', '.join(its)}, but rank 0 with {', '.join(own)}; all "
                                  "machines need the same versions, options and weights")
            assert replace(other, device=first.device, folder=first.folder) == first, "ranks of one engine have the same model"
        return cast(Survey, first)

    def check(self, config: EngineConfig) -> None:
        self._each("check", config)

    def load(self, progress: Progress | None = None) -> Loaded:
        """Loads every rank. Returns the smallest room, and the largest memory use of weights and steps, of all ranks."""
        found: list[Loaded] = self._each("load", progress)
        first = found[0]
        assert all(other.states == first.states and other.computation == first.computation for other in found)
        return replace(first, room=min(one.room for one in found), weight_bytes=max(one.weight_bytes for one in found),
                       step_bytes=max(one.step_bytes for one in found), graph_bytes=max(one.graph_bytes for one in found),
                       notes=list(dict.fromkeys(note for one in found for note in one.notes)))

    def prepare(self, layout: CacheLayout, max_model_len: int, opening: Opening | None) -> Prepared:
        first, *_ = self._each("prepare", layout, max_model_len, opening)
        return cast(Prepared, first)

    @abstractmethod
    def _each(self, call: str, *arguments: Any) -> list[Any]:
        """The results of a method of `Rank`, by rank, called at all of them at once, as they wait for each other. The first
        error is raised: that of an adapter once all have answered, any other at once."""

    def add_adapter(self, folder: str) -> str:
        name, *_ = self._each("add_adapter", folder)
        return str(name)

    def drop_adapter(self, name: str) -> None:
        self._each("drop_adapter", name)

    def start_profile(self) -> None:
        self._each("start_profile")

    def stop_profile(self, folder: str) -> list[str]:
        """One trace with rows of each rank; one of each where some are on other machines."""
        paths = [Path(name) for names in self._each("stop_profile", folder) for name in names]
        if all(path.exists() for path in paths):
            events = list[dict[str, Any]]()
            for rank, path in enumerate(paths):
                trace = json.loads(path.read_text())
                path.unlink()
                for event in trace["traceEvents"]:
                    # Arrows are numbered by each process.
                    events.append(event | {"id": f"{rank}.{event['id']}"} if "id" in event else event)
                    if event["name"] == "process_labels" and event["args"]["labels"] == "CPU":
                        event["args"]["labels"] = f"rank {rank}"
            paths = paths[:1]
            paths[0].write_text(json.dumps(trace | {"traceEvents": events}))
        return [str(path) for path in paths]

    def agree(self, results: Sequence[StepResult]) -> StepResult:
        """The result of a step, given the results of all ranks. A transfer has ended once it has on all ranks."""
        width = len(results) // self._stages
        start = len(results) - width
        first, *others = results[start:]
        for i, other in enumerate(others, start + 1):
            if not np.array_equal(other.tokens, first.tokens):
                raise RuntimeError(f"ranks {start} and {i} chose different tokens in step {first.id}: {first.tokens.tolist()} "
                                   f"and {other.tokens.tolist()}")
        self.seconds = self.seconds + [one.seconds for one in results]
        self._picks.update((stage, one.picks) for stage, one in enumerate(results[::width]) if one.picks is not None)
        if first.picks is not None:
            first.picks = np.concatenate([self._picks[stage] for stage in sorted(self._picks)])
        loads = [self._whole(self._loads, found.ticket, found) for one in results for found in one.load_results]
        writes = [self._whole(self._writes, found.id, found) for one in results for found in one.write_results]
        first.load_results = [_loaded(parts) for parts in loads if parts is not None]
        first.write_results = [WriteResult(parts[0].id, all(part.ok for part in parts), max(part.seconds for part in parts))
                               for parts in writes if parts is not None]
        return first

    def _whole(self, waiting: dict[int, list[Found]], number: int, part: Found) -> list[Found] | None:
        """The parts of a transfer with this number, once all ranks' have come."""
        parts = waiting.setdefault(number, [])
        parts.append(part)
        return waiting.pop(number) if len(parts) == len(self.ranks) else None


def _loaded(parts: Sequence[LoadResult]) -> LoadResult:
    return LoadResult(parts[0].ticket, all(part.ok for part in parts), max(part.seconds for part in parts),
                      tuple(dict.fromkeys(name for part in parts for name in part.lost)),
                      tuple(dict.fromkeys(name for part in parts for name in part.missed)))
