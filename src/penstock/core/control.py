"""The messages between an engine and its ranks in other processes."""

from typing import Any

import msgspec

from penstock.core.child import Failed
from penstock.core.plan import Ints, Masks, StepPlan, StepResult

BEAT_SECONDS = 0.5
"""The interval at which a rank says that it lives."""

CALLS = ("survey", "check", "load", "prepare", "add_adapter", "drop_adapter", "start_profile", "stop_profile")
"""The methods of `engine/ranks.py::Rank` that are answered. Arguments and results have the types of their signature."""

STEPS: dict[str, Any] = {"launch": StepPlan, "choose": Masks}
"""The two launches of a step, with the type of their argument. A step is answered by Stepped, in order."""


class Told(msgspec.Struct, array_like=True):
    """From the engine: a call of CALLS with a list of arguments, one of STEPS with its argument, leave, or close."""

    call: str
    body: msgspec.Raw = msgspec.Raw(b"\xc0")


class Beat(msgspec.Struct, array_like=True, tag="beat"):
    """The rank lives, and has computed for so many seconds of processor time: none that waits for a GPU."""

    worked: float


class Loading(msgspec.Struct, array_like=True, tag="loading"):
    """Progress of loading: bytes done, and in all."""

    done: int
    total: int


class Answer(msgspec.Struct, array_like=True, tag="answer"):
    """The end of a call: what it returned, encoded."""

    body: msgspec.Raw = msgspec.Raw(b"\xc0")


class Stepped(msgspec.Struct, array_like=True, tag="stepped"):
    result: StepResult


class Drafted(msgspec.Struct, array_like=True, tag="drafted"):
    """The drafts that a step has written, before its masks come, if `StepPlan.tells_drafts`."""

    tokens: Ints


Said = Beat | Loading | Answer | Drafted | Stepped | Failed
