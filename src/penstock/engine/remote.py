"""Ranks in processes of their own: starts them, tells them what to do, and notices when one is lost.

Each rank has two ZMQ sockets in a folder that only this user may enter. A rank that has ended, is stopped, or has been silent
for too long is lost, and with it the group: every other rank may be waiting for it."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from socket import gethostbyname
from typing import Any, get_type_hints

import msgspec
import zmq

from penstock.core import child
from penstock.core.child import Failed
from penstock.core.control import CALLS, Answer, Beat, Drafted, Loading, Said, Stepped, Told
from penstock.core.errors import EngineDeadError
from penstock.core.plan import Ints, Masks, StepPlan, StepResult
from penstock.core.wire import decoder, encode
from penstock.engine.executor import Begun
from penstock.engine.ranks import Progress, Rank, RankGroup
from penstock.parallel.axis import Place

_SILENCE = 4.0
"""Seconds without a sign of life after which a rank that is ready is lost."""
_STARTING = 120.0
"""The same before it is ready: importing and loading may keep the thread that says so from running."""
_STOPPED = 2.0
"""The same for a process that the system reports as stopped."""
_POLL_MS = 200
_RESULTS = {call: decoder(get_type_hints(getattr(Rank, call))["return"]) for call in CALLS}
_CLOSE_SECONDS = 10.0


class RemoteRank:
    """The engine's handle of one rank. Calls and steps are each answered in order."""

    def __init__(self, options: bytes, place: Place, name: str, address: str, context: zmq.Context[Any], here: bool) -> None:
        """`here`: the process is started; else another machine does that."""
        self.name = name
        self._outbox, self._inbox = child.bound(context, address)
        self._decode: Callable[[bytes], Said] = decoder(Said)
        self.results: deque[StepResult] = deque()
        self.drafts: deque[Ints] = deque()
        self.answers: deque[msgspec.Raw | Failed] = deque()
        """Results of calls, or why they failed."""
        self.progress: Progress | None = None
        self.ready = False
        self.lost: str | None = None
        """Why the rank is gone."""
        self.process = started(options, place, address) if here else None
        self._heard = time.monotonic()

    def tell(self, call: str, body: bytes) -> None:
        """Sends a call or a launch, whose argument is encoded."""
        message, sent = encode(Told(call, msgspec.Raw(body))), False
        while not sent:
            self._raise()
            try:
                self._outbox.send(message, zmq.NOBLOCK)
                sent = True
            except zmq.Again:
                # It has not connected yet, and may have been lost before.
                self.listen(_POLL_MS)
                self.look()

    def listen(self, timeout: int) -> None:
        """Takes in all messages that are there; waits for one for up to `timeout` milliseconds."""
        if not self._inbox.poll(timeout):
            return
        while True:
            try:
                message = self._decode(self._inbox.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._heard = time.monotonic()
            if isinstance(message, Stepped):
                self.results.append(message.result)
            elif isinstance(message, Drafted):
                self.drafts.append(message.tokens)
            elif isinstance(message, Answer):
                self.answers.append(message.body)
            elif isinstance(message, Loading):
                if self.progress is not None:
                    self.progress(message.done, message.total)
            elif isinstance(message, Failed) and message.kind != "other":
                self.answers.append(message)
            elif isinstance(message, Failed):
                self.lost = f"{self.name} failed: {message.reason}"
                self._raise()
            else:
                assert isinstance(message, Beat)

    def look(self) -> None:
        """Raises EngineDeadError if the rank is lost. Call `listen` before."""
        status = None if self.process is None else self.process.poll()
        if status is not None:
            self.listen(0)
            self.lost = f"{self.name} {child.ended(status)}"
        else:
            silent = time.monotonic() - self._heard
            if silent > (_SILENCE if self.ready else _STARTING):
                self.lost = f"{self.name} has been silent for {silent:.1f} s"
            elif silent > _STOPPED and self.process is not None and _stopped(self.process.pid):
                self.lost = f"{self.name} is stopped (SIGSTOP)"
        self._raise()

    def _raise(self) -> None:
        if self.lost is not None:
            raise EngineDeadError(self.lost)

    @property
    def well(self) -> bool:
        """Whether nothing is known of its end."""
        return self.lost is None and (self.process is None or self.process.poll() is None)

    def end(self) -> None:
        """Asks the process to end."""
        if self.well:
            with suppress(zmq.ZMQError):
                self._outbox.send(encode(Told("close")), zmq.NOBLOCK)

    def kill(self) -> None:
        """Ends the process at once; one on another machine ends when its connection does."""
        if self.process is not None:
            self.process.kill()

    def close(self, timeout: float = 0.0) -> None:
        """Waits so long for the process to end, then kills it."""
        if self.process is not None:
            finish(self.process, timeout)
        until = time.monotonic() + timeout
        while self.process is None and self.well and not self.answers and time.monotonic() < until:
            # Its answer to `end`: a message that waits to be sent would not outlive this process.
            self.listen(_POLL_MS)
        self._outbox.close()
        self._inbox.close()


def address_of(place: Place) -> str:
    """The first of the two addresses at which machine 0 listens to a rank, where there are several machines."""
    host, _, port = place.rendezvous.removeprefix("tcp://").rpartition(":")
    # By number, as sockets are bound to no names.
    return f"tcp://{gethostbyname(host)}:{int(port) + 1 + 2 * place.rank}"


def started(options: bytes, place: Place, address: str) -> subprocess.Popen[bytes]:
    """The process of a rank."""
    words, environment = child.command("penstock.worker.process")
    process = subprocess.Popen(words, stdin=subprocess.PIPE, env=environment)
    assert process.stdin is not None
    # As worker/rank.py::Start, which would bring torch. One that has ended already is noticed later.
    with suppress(BrokenPipeError):
        process.stdin.write(msgspec.json.encode((address, msgspec.Raw(options), place)) + b"\n")
        process.stdin.flush()
    return process


def finish(process: subprocess.Popen[bytes], timeout: float) -> None:
    """Waits so long for a process to end, then kills it."""
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdin is not None:
        process.stdin.close()


class RemoteGroup(RankGroup):
    """Ranks in processes. A plan is encoded once."""

    ranks: list[RemoteRank]

    overlaps = True

    def __init__(self, options: bytes, places: Sequence[Place], here: int, end: Callable[[], None] | None = None) -> None:
        """Starts a process at each of the first places, as many as are `here`, with the encoded options; other machines start
        the rest. None is left if that fails. `end` is called after the end of all.

        All share the process's context of ZeroMQ: one of their own would wait for its sockets for ever if it was collected in a
        cycle with them, as that of an engine that nobody has closed."""
        self._folder = child.own_folder()
        super().__init__([], max(place.stage for place in places))
        self._closed = False
        self._lost: str | None = None
        self._end = end
        try:
            for place in places:
                found = replace(place, rendezvous=place.rendezvous or self._folder)
                address = f"ipc://{self._folder}/rank-{place.rank}" if place.rank < here else address_of(place)
                self.ranks.append(RemoteRank(options, found, f"rank {place.number} of {place.world}", address,
                                             zmq.Context.instance(), place.rank < here))
        except BaseException:
            self.close()
            raise

    def _each(self, call: str, *arguments: Any) -> list[Any]:
        if call == "load":
            (self.ranks[0].progress,), arguments = arguments, ()
        self.tell(call, arguments)
        found: dict[RemoteRank, Any] = {}
        while len(found) < len(self.ranks):
            waiting = [rank for rank in self.ranks if rank not in found]
            self.look(waiting[0])
            found.update((rank, rank.answers.popleft()) for rank in waiting if rank.answers)
            failed = next((answer for answer in found.values() if isinstance(answer, Failed)), None)
            if failed is not None and (len(found) == len(self.ranks) or "adapter" not in call):
                raise failed.error()
        for rank in self.ranks:
            rank.ready = rank.ready or call == "prepare"
        return [_RESULTS[call](found[rank]) for rank in self.ranks]

    def launch(self, plan: StepPlan) -> Begun:
        self.tell("launch", plan)
        return _RemoteStep(self)

    def tell(self, call: str, argument: Any) -> None:
        """Sends a call or a launch to every rank."""
        self._raise()
        body = encode(argument)
        for rank in self.ranks:
            rank.tell(call, body)

    def _raise(self) -> None:
        if self._lost is not None:
            raise EngineDeadError(self._lost)

    def look(self, first: RemoteRank | None = None) -> None:
        """Takes in what ranks say, for a while if the `first` has said nothing. Raises EngineDeadError if one is lost; then no
        process is left, as none can go on without the others."""
        self._raise()
        try:
            if first is not None:
                first.listen(_POLL_MS)
            for rank in self.ranks:
                rank.listen(0)
                rank.look()
        except EngineDeadError as error:
            self._lost = str(error)
            self.close()
            raise

    def close(self) -> None:
        """Ends all processes: politely if none is lost."""
        if self._closed:
            return
        self._closed = True
        whole = all(rank.well for rank in self.ranks)
        with ExitStack() as closing:
            closing.callback(shutil.rmtree, self._folder, ignore_errors=True)
            if self._end is not None:
                closing.callback(self._end)
            for rank in self.ranks:
                if whole:
                    rank.end()
                else:
                    rank.kill()
                closing.callback(rank.close, _CLOSE_SECONDS)


class _RemoteStep:
    """A step of ranks in processes. Results must be taken in the order of launches."""

    def __init__(self, group: RemoteGroup) -> None:
        self._group = group
        self._found: list[StepResult | None] = [None] * len(group.ranks)
        self._result: StepResult | None = None

    def drafts(self) -> Ints:
        for rank in self._group.ranks:
            while not rank.drafts:
                self._group.look(rank)
        # They are the same on all ranks.
        first, *_ = [rank.drafts.popleft() for rank in self._group.ranks]
        return first

    def choose(self, masks: Masks) -> None:
        self._group.tell("choose", masks)

    def result(self) -> StepResult:
        if self._result is None:
            for i, rank in enumerate(self._group.ranks):
                while self._found[i] is None:
                    if rank.results:
                        self._found[i] = rank.results.popleft()
                    else:
                        # Any rank may be the one that this one waits for.
                        self._group.look(rank)
            self._result = self._group.agree([one for one in self._found if one is not None])
        return self._result


def _stopped(pid: int) -> bool:
    """Whether the system says that a process is stopped or traced."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in "Tt"

