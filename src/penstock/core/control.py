"""The messages between an engine and its ranks in other processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from penstock.core.plan import Masks, StepPlan, StepResult
from penstock.core.rank import Loaded, Prepared, Survey
from penstock.core.wire import State

BEAT_SECONDS = 0.5
"""The interval at which a rank says that it lives."""


class Told(msgspec.Struct, array_like=True):
    """From the engine: a call, or one of a step's two launches. `body` is encoded as the call's type in CALLS."""

    call: str
    body: msgspec.Raw = msgspec.Raw(b"\xc0")


@dataclass(frozen=True)
class StoresToOpen:
    """`stores/behind.py::Opening` without the layout, which a rank knows itself."""

    host_slabs: int
    disk: str | None
    remote: str | None
    adopt: bool
    model: str
    dtype: str
    weights: str
    computation: str


@dataclass(frozen=True)
class Preparing:
    """Arguments of `prepare`. `page` and `slabs` determine the layout, given the rank's own states."""

    page: int
    slabs: int
    max_model_len: int
    stores: StoresToOpen | None


class LoadedFacts(msgspec.Struct, array_like=True):
    """`Loaded`, whose states need a type of their own."""

    loaded: Loaded
    states: list[State]

    @classmethod
    def of(cls, loaded: Loaded) -> LoadedFacts:
        return cls(replace(loaded, states=[]), [State.of(state) for state in loaded.states])

    def facts(self) -> Loaded:
        return replace(self.loaded, states=[state.spec() for state in self.states])


class Beat(msgspec.Struct, array_like=True, tag="beat"):
    """The rank lives."""


class Loading(msgspec.Struct, array_like=True, tag="loading"):
    """Progress of loading: bytes done, and in all."""

    done: int
    total: int


class Answer(msgspec.Struct, array_like=True, tag="answer"):
    """The end of a call, encoded as its type in ANSWERS."""

    body: msgspec.Raw


class Stepped(msgspec.Struct, array_like=True, tag="stepped"):
    """The result of a step."""

    result: StepResult


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """A call or a step raised an error. `kind`: config, model or other."""

    reason: str
    kind: str


Said = Beat | Loading | Answer | Stepped | Failed

ANSWERS: dict[str, Any] = {"survey": Survey, "check": None, "load": LoadedFacts, "prepare": Prepared,
                            "add_adapter": str, "drop_adapter": None}
"""The calls that are answered, with the type of what they return."""
STEPS: dict[str, Any] = {"launch": StepPlan, "choose": Masks}
"""The two launches of a step. A step is answered by Stepped, in order."""
