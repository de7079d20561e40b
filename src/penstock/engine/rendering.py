"""Runs chat templates in separate processes, so that a template that loops or allocates too much kills its process only.

A template is a program by the model's authors. Each rendering has a deadline, and each process a memory limit; a process that
exceeds one is killed, and a new one starts with the next request. `Renderers` is the server's side, `main` the child's."""

import contextlib
import ctypes
import os
import queue
import resource
import select
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from penstock.core.child import Refused, command
from penstock.core.errors import RequestError
from penstock.engine.retention import Breakpoint, Marked, written
from penstock.engine.work import THREADS, abandoned
from penstock.text import ChatTemplate

MEMORY_BYTES = 1 << 30
"""Memory that a rendering process may have beyond what it has at its start."""

ABANDONED_SECONDS = 0.5
"""Time for a cancelled rendering to finish before its process is killed."""

PR_SET_PDEATHSIG = 1
"""A constant of Linux's prctl."""

_LENGTH = struct.Struct("<Q")


class Setup(msgspec.Struct, array_like=True):
    """The first message to a child: the templates, and its limits."""

    sources: dict[str, str]
    variables: dict[str, Any]
    seconds: float


class Conversation(msgspec.Struct, array_like=True):
    """A rendering job. `template` is a name or a text instead of the model's default; `how` is `ChatTemplate.render`'s."""

    messages: list[Any]
    tools: list[Any] | None = None
    template: str | None = None
    how: dict[str, Any] = {}


class Rendered(msgspec.Struct, array_like=True, tag="rendered"):
    text: str
    marks: list[tuple[int, int, float]]


Reply = Rendered | Refused


class Renderers:
    """Processes that render one model's templates. `render` may be called from several threads; each call takes one process."""

    def __init__(self, template: ChatTemplate, seconds: float, processes: int = THREADS) -> None:
        """Starts the first process, the others when they are needed. `seconds` is the deadline of one rendering. With as many
        processes as threads call, none waits for another's rendering."""
        self._setup = Setup(template.sources, template.variables, seconds)
        self._free: queue.LifoQueue[_Child | None] = queue.LifoQueue()
        self._children: set[_Child] = set()
        self._closed = False
        for _ in range(processes - 1):
            self._free.put(None)
        self._free.put(self._start())

    def _start(self) -> "_Child":
        child = _Child(self._setup)
        self._children.add(child)
        if self._closed:
            child.end()
        return child

    def render(self, conversation: Conversation) -> Marked:
        """The conversation as text, with its marks. Blocks. RequestError if the template refuses it or takes too much."""
        try:
            job = msgspec.msgpack.encode(conversation)
        except OverflowError:
            raise RequestError("a number in the conversation does not fit in 64 bits; send a smaller one",
                               param="messages") from None
        child = self._free.get()
        try:
            if child is None:
                child = self._start()
            reply = child.ask(job, self._setup.seconds)
        except BaseException:
            # The child may be in the middle of a rendering.
            if child is not None:
                self._children.discard(child)
                child.kill()
            child = None
            raise
        finally:
            self._free.put(child)
        if isinstance(reply, Refused):
            raise reply.error()
        return Marked(reply.text, tuple(Breakpoint(*mark) for mark in reply.marks))

    def close(self) -> None:
        """Ends the processes, also in the middle of a rendering, which then fails."""
        self._closed = True
        for child in list(self._children):
            child.end()


class _Child:
    """One process, from the server's side."""

    def __init__(self, setup: Setup) -> None:
        words, environment = command("penstock.engine.rendering")
        self._process = subprocess.Popen([*words, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         env=environment, bufsize=0)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        self._pending = _framed(msgspec.msgpack.encode(setup))
        self._decode = msgspec.msgpack.Decoder(Reply).decode
        self._until = 0.0

    def ask(self, job: bytes, seconds: float) -> Reply:
        """The child's reply. RequestError if it does not come in time, or the child ends."""
        # A process that has just started gets the time that starting takes.
        self._until = time.monotonic() + seconds + (10.0 if self._pending else 1.0)
        try:
            self._write(self._pending + _framed(job))
            self._pending = b""
            reply: Reply = self._decode(self._read(_LENGTH.unpack(self._read(_LENGTH.size))[0]))
            return reply
        except (TimeoutError, EOFError, BrokenPipeError):
            self.kill()
            raise _failure(self._process.wait(), seconds) from None

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            self._wait(write=True)
            view = view[os.write(self._in, view[:1 << 20]):]

    def _read(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            self._wait()
            piece = os.read(self._out, min(size - len(found), 1 << 20))
            if not piece:
                raise EOFError
            found += piece
        return bytes(found)

    def _wait(self, write: bool = False) -> None:
        """Waits until the pipe can be read (or written). TimeoutError after `_until`, or soon after the job was cancelled:
        not at once, because a new process costs more than most renderings."""
        poller = select.poll()
        poller.register(self._in if write else self._out, select.POLLOUT if write else select.POLLIN)
        while not poller.poll(100):
            if abandoned():
                self._until = min(self._until, time.monotonic() + ABANDONED_SECONDS)
            if time.monotonic() > self._until:
                raise TimeoutError

    def end(self) -> None:
        """Kills the process; a thread that reads from it gets end-of-file."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def kill(self) -> None:
        """Ends the process and frees everything. Only for the thread that uses it."""
        self.end()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()


def _framed(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _failure(status: int, seconds: float) -> RequestError:
    if status in (-signal.SIGALRM, -signal.SIGKILL):
        return RequestError(f"the chat template did not finish with these messages within {seconds:g} s (--template-timeout); "
                            "send less, or have the server's operator look at the template", param="messages",
                            code="template_error")
    return RequestError(f"the chat template ended its process (status {status}) on these messages; most likely it needed more "
                        f"than {MEMORY_BYTES >> 20} MiB of memory", param="messages", code="template_error")


# -- in the child


def main() -> None:
    """The child's entry point: reads the templates, then renders one conversation after another until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The kernel ends this process when its parent is killed, also in the middle of a rendering.
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        # The parent was killed before prctl took effect.
        os._exit(0)
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # Standard output goes to standard error: a library's print must not become part of a reply.
    os.dup2(2, 1)
    setup = msgspec.msgpack.decode(_receive(source), type=Setup)
    template = ChatTemplate(setup.sources, setup.variables)
    # The address space's present size, in pages.
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    decode = msgspec.msgpack.Decoder(Conversation).decode
    while True:
        data = _receive(source)
        # The timer also ends the process if the server is gone, even inside a library.
        signal.setitimer(signal.ITIMER_REAL, setup.seconds)
        reply = msgspec.msgpack.encode(_answer(template, decode(data)))
        signal.setitimer(signal.ITIMER_REAL, 0)
        sink.write(_framed(reply))
        sink.flush()


def _answer(template: ChatTemplate, job: Conversation) -> Reply:
    try:
        chosen = template if job.template is None else template.using(job.template)
        marked = written(lambda messages, tools: chosen.render(messages, tools, **job.how), job.messages, job.tools)
        return Rendered(marked.text, [(mark.at, mark.priority, mark.seconds) for mark in marked.marks])
    except RequestError as error:
        return Refused.of(error)
    except MemoryError:
        return Refused(f"the chat template needs more than {MEMORY_BYTES >> 20} MiB of memory for these messages", "messages",
                       "template_error")


def _receive(source: BinaryIO) -> bytes:
    """The next message; ends the process where there is none."""
    head = source.read(_LENGTH.size)
    data = source.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else b""
    if not data:
        sys.stderr.flush()
        os._exit(0)
    return data


if __name__ == "__main__":
    main()
