"""A rank in a process of its own: the loop that carries out what the engine tells it. Nothing is ever pickled.

The main thread does all work; a second one says twice a second that the process lives."""

import threading
import time
from collections import deque
from collections.abc import Callable
from types import GenericAlias
from typing import get_type_hints

import msgspec
import torch
import zmq

from penstock.core import child
from penstock.core.control import BEAT_SECONDS, CALLS, STEPS, Answer, Beat, Drafted, Loading, Said, Stepped, Told
from penstock.core.errors import ConfigError, ModelError
from penstock.core.wire import decoder, encode
from penstock.worker.rank import Rank, Start
from penstock.worker.worker import Launched

_IDLE_MS = 1
"""A rank waits so long for a plan before it takes part in other engines' steps without one."""
_END_MS = 1000
"""A rank that others have left waits so long to be told of the end, which is else a loss."""
_WATCH_SECONDS = 2e-5
"""The interval at which a step on the device is looked at while no message comes."""


class Loop:
    """Carries out messages in order, and sends the results of steps as they end."""

    def __init__(self, rank: Rank, inbox: child.Socket, say: Callable[[Said], None]) -> None:
        self.rank = rank
        self._inbox = inbox
        self._say = say
        self._read: Callable[[bytes], Told] = decoder(Told)
        self._arguments = {call: decoder(_arguments(getattr(Rank, call))) for call in (*CALLS, "leave")}
        self._steps = {step: decoder(kind) for step, kind in STEPS.items()}
        self._flying: deque[Launched] = deque()

    def run(self) -> None:
        """Returns at the call `close`, or raises what a step raised, unless this rank may outlive those that are lost."""
        while True:
            try:
                told = self._next()
                if told is None:
                    self._say(Stepped(self._flying.popleft().result()))
                elif told.call in STEPS:
                    self._step(told)
            except Exception as error:
                if not self.rank.renews:
                    raise
                self._say(child.Failed.of(error))
                while (told := self._read(self._inbox.recv())).call not in ("leave", "close"):
                    pass
            if told is not None and told.call not in STEPS:
                if told.call == "close":
                    return
                self._call(told)

    def _next(self) -> Told | None:
        """The next message; None if the oldest step in flight has ended first."""
        while self._flying and not self._flying[0].waits:
            if self._inbox.poll(0):
                break
            if self._flying[0].ended():
                return None
            time.sleep(_WATCH_SECONDS)
        while self.rank.together and not self._inbox.poll(_IDLE_MS):
            # A step that waits for its masks goes on with sums of this engine's ranks, which may not be in others' steps then.
            if self.rank.called and not (self._flying and self._flying[-1].waits):
                try:
                    self.rank.worker.follow()
                except RuntimeError:
                    # At the end of all, other engines' ranks may leave before this one is told to.
                    if not self._inbox.poll(_END_MS):
                        raise
        return self._read(self._inbox.recv())

    def _step(self, told: Told) -> None:
        argument = self._steps[told.call](told.body)
        if told.call == "launch":
            self._flying.append(self.rank.launch(argument))
            if argument.tells_drafts:
                self._say(Drafted(self._flying[-1].drafts()))
        else:
            self._flying[-1].choose(argument)

    def _call(self, told: Told) -> None:
        arguments = self._arguments[told.call](told.body)
        if told.call == "leave":
            self._flying.clear()
        if told.call == "load":
            arguments = [lambda done, total: self._say(Loading(done, total))]
        try:
            value = getattr(self.rank, told.call)(*arguments)
        except (ConfigError, ModelError) as error:
            self._say(child.Failed.of(error))
            return
        self._say(Answer(msgspec.Raw(encode(value))))


def _arguments(method: Callable[..., object]) -> object:
    """The types of a method's arguments that are sent."""
    kinds = [kind for name, kind in get_type_hints(method).items() if name not in ("return", "progress")]
    return GenericAlias(tuple, tuple(kinds))


def main() -> None:
    """The process's entry point. It ends with the engine, whatever happens."""
    child.run(Start, _serve)


def _serve(start: Start, inbox: child.Socket, say: Callable[[Said], None]) -> None:
    threading.Thread(target=_beat, args=(start.address,), name="penstock-beat", daemon=True).start()
    rank = Rank(start.options, start.place)
    Loop(rank, inbox, say).run()
    rank.close()
    # An engine on another machine waits for this.
    say(Answer())


def _beat(address: str) -> None:
    # A context of its own, as the other one waits at its end for all of its sockets.
    outbox, pause = child.connected(zmq.Context(), address), threading.Event()
    while True:
        outbox.send(encode(Beat(0.0 if torch.cuda.is_initialized() else time.process_time())))
        pause.wait(BEAT_SECONDS)


if __name__ == "__main__":
    main()
