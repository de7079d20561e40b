"""Ranks in processes of their own: starts them, tells them what to do, and notices when one is lost.

Each rank has two ZMQ sockets in a folder that only this user may enter. A rank that has ended, is stopped, or has been silent
for too long is lost, and with it the group: others may wait for it. On another machine, `run` starts those of that machine."""

import math
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from socket import gethostbyname
from typing import Any, get_type_hints

import msgspec
import zmq

from penstock.core import child
from penstock.core.control import CALLS, Answer, Drafted, Loading, Said, Stepped, Told
from penstock.core.errors import ConfigError, EngineDeadError, RankLostError
from penstock.core.plan import Ints, Masks, StepPlan, StepResult
from penstock.core.wire import decoder, encode
from penstock.engine.executor import Begun
from penstock.engine.ranks import Progress, Rank, RankGroup
from penstock.observe.log import LOG
from penstock.parallel.axis import Place

_LOOK_SECONDS, _AGAIN_SECONDS = 0.1, 2.0
"""Between looks at ranks; and time for machine 0 to let go of ranks that are lost, before others are started in their place."""


def run(options: bytes, places: Sequence[Place], again: bool, asked: Sequence[float] = ()) -> int:
    """Runs ranks with the encoded options until the engine ends them (status 0) or one is lost (1), or all start `again`; once
    there is one, until the first time of time.monotonic() in `asked`."""
    while True:
        LOG.info("ranks %d to %d join the engine at %s", places[0].rank, places[-1].rank, places[0].rendezvous)
        processes = [started(options, place, address_of(place)) for place in places]
        try:
            while all(process.poll() is None for process in processes) and time.monotonic() < min(asked, default=math.inf):
                time.sleep(_LOOK_SECONDS)
            ended = {process.poll() for process in processes} <= {0, None}
        finally:
            for process in processes:
                finish(process, _AGAIN_SECONDS)
        if ended or asked or not again:
            return 0 if ended else 1
        LOG.error("a rank was lost; the ranks of this machine start again")


_SILENCE = 4.0
"""Seconds without a sign of life after which a rank that is ready is lost."""
_STARTING = 120.0
"""The same before it is ready: importing and loading may keep the thread that says so from running."""
_STOPPED = 2.0
"""The same for a process that the system reports as stopped."""
_STUCK = 50.0
"""Seconds after which a step has failed that no rank has ended: ranks may wait for each other while they say that they live. On
CPUs those count in which ranks do not compute."""
_NAMELESS = 30.0
"""Seconds within which the name of machine 0 gets its address: a cluster's names follow the start of its pods."""
_WORK = 0.05
"""Seconds of processor time between two signs of life above which a rank computes: those and waiting take less."""
_SETTLE, _LEAVE = 1.0, 15.0
"""The longest that the cause of a failed step takes to show (a rank that has gone, or else the step), and ranks to `leave`."""
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
        self.answers: deque[msgspec.Raw | child.Failed] = deque()
        """Results of calls, or why they failed."""
        self.progress: Progress | None = None
        self.ready = False
        self.failed: str | None = None
        """The error of a step, in which the rank may have waited for one that is lost."""
        self.lost: str | None = None
        """Why the rank is gone."""
        self.owed, self.moved = 0, time.monotonic()
        """Steps that it has not ended; when it was told of one or ended one, and on CPUs when it was last seen to compute."""
        self._worked = 0.0
        self.process = started(options, place, address) if here else None
        self._heard = time.monotonic()

    def tell(self, call: str, body: bytes, look: Callable[[], None] | None = None) -> None:
        """Sends a call or a launch, whose argument is encoded. `look`: looks at all ranks, while this one is waited for."""
        message, sent = encode(Told(call, msgspec.Raw(body))), False
        self.owed += call == "launch"
        self.moved = time.monotonic()
        while not sent:
            self._raise()
            try:
                self._outbox.send(message, zmq.NOBLOCK)
                sent = True
            except zmq.Again:
                # It has not connected yet, and any rank may have been lost before.
                self.listen(_POLL_MS)
                (look or self.look)()

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
                self.owed, self.moved = self.owed - 1, self._heard
            elif isinstance(message, Drafted):
                self.drafts.append(message.tokens)
            elif isinstance(message, Answer):
                self.answers.append(message.body)
            elif isinstance(message, Loading):
                if self.progress is not None:
                    self.progress(message.done, message.total)
            elif isinstance(message, child.Failed) and message.kind != "other":
                self.answers.append(message)
            elif isinstance(message, child.Failed):
                self.failed = f"{self.name} failed: {message.reason}"
            else:
                self.moved = self._heard if message.worked > self._worked + _WORK else self.moved
                self._worked = message.worked

    def look(self, late: bool = False) -> None:
        """Raises EngineDeadError if the rank is lost. Call `listen` before. `late`: steps should have ended by now."""
        status = None if self.process is None else self.process.poll()
        if status is not None:
            self.listen(0)
            self.lost = self.failed or f"{self.name} {child.ended(status)}"
        else:
            silent = time.monotonic() - self._heard
            if silent > (_SILENCE if self.ready else _STARTING):
                self.lost = f"{self.name} has been silent for {silent:.1f} s"
            elif silent > _STOPPED and self.process is not None and _stopped(self.process.pid):
                self.lost = f"{self.name} is stopped (SIGSTOP)"
            elif late and self.owed:
                self.lost = f"{self.name} has not ended a step for {_STUCK:g} s"
        self._raise()

    def _raise(self) -> None:
        reason = self.lost or self.failed
        if reason is not None:
            raise EngineDeadError(reason)

    @property
    def well(self) -> bool:
        """Whether nothing is known of its end."""
        return self.lost is None and (self.process is None or self.process.poll() is None)

    def left(self, answer: bytes, until: float) -> None:
        """Waits for this answer to `leave`, up to so many seconds of time.monotonic(), and forgets all before it."""
        while not self.answers or self.answers[-1] != msgspec.Raw(answer):
            self.listen(_POLL_MS)
            if not self.well or time.monotonic() > until:
                raise EngineDeadError(f"{self.name} does not let go of its last step")
        for left in (self.results, self.drafts, self.answers):
            left.clear()
        self.failed, self.owed, self.ready = None, 0, False

    def end(self) -> None:
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
    until = time.monotonic() + _NAMELESS
    while True:
        try:
            # By number, as sockets are bound to no names.
            return f"tcp://{gethostbyname(host)}:{int(port) + 1 + 2 * place.rank}"
        except OSError as error:
            if time.monotonic() > until:
                raise ConfigError(f"master_addr is {host}, which has no address: {error}") from None
            time.sleep(1)


def started(options: bytes, place: Place, address: str) -> subprocess.Popen[bytes]:
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

    def __init__(self, options: bytes, places: Sequence[Place], here: int, end: Callable[[], None] | None = None,
                 renews: bool = False) -> None:
        """Starts a process at each of the first places, as many as are `here`, with the encoded options; other machines start
        the rest. None is left if that fails. `end` is called after the end of all. `renews`: ranks outlive others.

        All share the process's ZeroMQ context: an own one, collected in a cycle with its sockets, would wait for them."""
        self._folder = child.own_folder()
        super().__init__([], max(place.stage for place in places))
        self._closed = False
        self._lost: EngineDeadError | None = None
        self._end = end
        self._options, self._places, self._here, self._renews = options, places, here, renews
        try:
            for place in places:
                self.ranks.append(self._made(place, self._folder))
        except BaseException:
            self.close()
            raise

    def _made(self, place: Place, folder: str) -> RemoteRank:
        """A new rank that meets the others in the folder, where its place names no other rendezvous."""
        here = place.rank < self._here
        address = f"ipc://{folder}/rank-{place.rank}" if here else address_of(place)
        return RemoteRank(self._options, replace(place, rendezvous=place.rendezvous or folder),
                          f"rank {place.number} of {place.world}", address, zmq.Context.instance(), here)

    def renewed(self) -> "RemoteGroup":
        """After a loss: the ranks that live, which keep their weights, and new ones in place of the others. This group is then
        closed. EngineDeadError if none could be kept; then none is left."""
        try:
            gone = [rank for rank in self.ranks if rank.lost is not None] or [rank for rank in self.ranks if rank.failed]
            if not self._renews or len(gone) == len(self.ranks):
                raise EngineDeadError(f"no rank can be kept: {self._lost}")
            for rank in gone:
                rank.kill()
                rank.close()
            self._folder, before = child.own_folder(), self._folder
            until, kept = time.monotonic() + _LEAVE, [rank for rank in self.ranks if rank not in gone]
            for rank in kept:
                rank.failed = None
                rank.tell("leave", encode([self._folder]))
            for rank in kept:
                rank.left(encode(self._folder), until)
            shutil.rmtree(before, ignore_errors=True)
            for place in self._places:
                if self.ranks[place.rank] in gone:
                    self.ranks[place.rank] = self._made(place, self._folder)
            found = copy(self)
            RankGroup.__init__(found, self.ranks, self._stages - 1)
            found._lost, self._closed = None, True  # noqa: SLF001 (its own)
            return found
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
            failed = next((answer for answer in found.values() if isinstance(answer, child.Failed)), None)
            if failed is not None and (len(found) == len(self.ranks) or "adapter" not in call):
                raise failed.error()
        for rank in self.ranks:
            rank.ready = rank.ready or call == "prepare"
        return [_RESULTS[call](found[rank]) for rank in self.ranks]

    def launch(self, plan: StepPlan) -> Begun:
        self.tell("launch", plan)
        return _RemoteStep(self)

    def tell(self, call: str, argument: Any) -> None:
        self._raise()
        body = encode(argument)
        for rank in self.ranks:
            rank.tell(call, body, self.look)

    def _raise(self) -> None:
        if self._lost is not None:
            raise self._lost

    def look(self, first: RemoteRank | None = None) -> None:
        """Takes in what ranks say, waiting if the `first` said nothing. EngineDeadError if one is lost; then all have ended."""
        self._raise()
        try:
            if first is not None:
                first.listen(_POLL_MS)
            for rank in self.ranks:
                rank.listen(0)
            late = time.monotonic() - max(rank.moved for rank in self.ranks) > _STUCK
            for rank in self.ranks:
                rank.look(late)
        except EngineDeadError as error:
            kept = self._renews and all(rank.ready for rank in self.ranks)
            self._lost = (RankLostError if kept else EngineDeadError)(self._cause(str(error)))
            if not kept:
                self.close()
            raise self._lost from None

    def _cause(self, first: str) -> str:
        """Why the group is lost, given what was noticed first: a step also fails because another rank is gone."""
        until = time.monotonic() + _SETTLE
        while True:
            gone = next((rank.lost for rank in self.ranks if rank.lost is not None and rank.failed is None), None)
            if gone is not None or time.monotonic() > until:
                return gone or first
            time.sleep(_POLL_MS / 10e3)
            for rank in self.ranks:
                with suppress(EngineDeadError):
                    rank.listen(0)
                    rank.look()

    def close(self) -> None:
        """Ends all processes: politely if none is lost."""
        if self._closed:
            return
        self._closed = True
        whole = all(rank.well and rank.failed is None for rank in self.ranks)
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
            for rank in self._group.ranks:
                while not rank.results:
                    # Any rank may be the one that this one waits for.
                    self._group.look(rank)
            self._result = self._group.agree([rank.results.popleft() for rank in self._group.ranks])
        return self._result


def _stopped(pid: int) -> bool:
    """Whether the system says that a process is stopped or traced."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in "Tt"
