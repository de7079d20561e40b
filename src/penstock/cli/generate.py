"""Answer a file of requests: IN.jsonl in OpenAI's batch format, answers into OUT.jsonl as they are ready.
Interrupt it at any moment and run it again: lines that OUT has an answer for are not asked again. --url: of a server."""

import argparse
import asyncio
import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from tqdm import tqdm

from penstock.cli.api import Api, add_target, complaint, open_api
from penstock.cli.client import ConnectionFailedError
from penstock.config.flags import at_least, integer
from penstock.core.errors import ConfigError, PenstockError
from penstock.server.batches.lines import DUPLICATE, ENDPOINTS, Ask, RefusedLineError, duplicate, read_line

BUSY = (429, 503)
"""Statuses that say: later. The line is asked again after a pause."""

PAUSES = (0.5, 1, 2, 4, 8, 15, 30)
"""Seconds between the attempts on one line; after the last the run stops, and can be resumed."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="IN.jsonl", type=Path, help="lines of {custom_id, method, url, body}")
    parser.add_argument("output", metavar="OUT.jsonl", type=Path, help="lines of {id, custom_id, response, error}; appended to")
    add_target(parser)
    parser.add_argument("--window", type=integer, metavar="N", default=256, help="the most requests in flight (default: 256)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """0 if every line has an answer, be it an error; PenstockError if the run had to stop before."""
    at_least(args, 1, "window")
    try:
        total = sum(1 for _ in read_lines(args.input))
        done = Done.read(args.output)
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from None
    try:
        failed = asyncio.run(_generate(args, done, total))
    except KeyboardInterrupt:
        print("penstock: interrupted; what is answered is kept, run the same command to go on", file=sys.stderr)
        raise
    if failed:
        print(f"penstock: {failed} of {total} lines failed; their entries in {args.output} say why", file=sys.stderr)
    return 0


@dataclass(frozen=True)
class Line:
    """One line of the input. `id` depends on its place and content, so it is the same on every run."""

    id: str
    raw: bytes


def read_lines(path: Path) -> Iterator[Line]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                yield Line(f"batch-{number}-{hashlib.blake2b(raw.strip(), digest_size=6).hexdigest()}", raw)


@dataclass
class Done:
    """The content of the output so far: the custom_ids answered, and the ids of lines without a custom_id."""

    custom_ids: set[str] = field(default_factory=set)
    lines: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, path: Path) -> "Done":
        """Reads an earlier run's output and cuts off an incomplete last line. ConfigError if the file holds anything else."""
        done = cls()
        if not path.exists():
            return done
        good = 0
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    break  # torn: the program was killed while writing it
                good += len(raw)
                if raw.strip():
                    done._note(path, number, raw)
        if good < path.stat().st_size:
            os.truncate(path, good)
        return done

    def _note(self, path: Path, number: int, raw: bytes) -> None:
        try:
            entry = msgspec.json.decode(raw)
            line, custom_id, error = entry["id"], entry["custom_id"], entry["error"]
        except (msgspec.DecodeError, KeyError, TypeError):
            raise ConfigError(f"line {number} of {path} is not an answer written by this command; choose another OUT.jsonl "
                              "or move that file away") from None
        self.lines.add(line)
        if custom_id is not None and (error or {}).get("code") != DUPLICATE:
            self.custom_ids.add(custom_id)


def entry(line: Line, custom_id: str | None, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
    return msgspec.json.encode({"id": line.id, "custom_id": custom_id, "response": response, "error": error}) + b"\n"


class _Output:
    """Appends whole lines, each in one write, so that only the last can be torn."""

    def __init__(self, path: Path) -> None:
        try:
            self._file: BinaryIO = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
        self.bar: tqdm[Any] | None = None
        self.failed = self.done = 0

    def write(self, data: bytes, good: bool) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) or 0:]
        self.failed += not good
        self.skip()

    def skip(self) -> None:
        """One more line needs no asking."""
        self.done += 1
        if self.bar is not None:
            self.bar.update()

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()


async def _generate(args: argparse.Namespace, done: Done, total: int) -> int:
    """Asks what is not answered yet, at most `window` at a time. Returns how many of this run's lines failed."""
    seen: set[str] = set()
    with closing(_Output(args.output)) as output:
        todo = _todo(args.input, done, seen, output)
        first = next(todo, None)
        if first is None:
            return output.failed  # nothing to ask: do not load a model for it
        async with open_api(args) as api:
            # Only now: the time that loading takes must not enter the rate and the time that is left.
            with tqdm(total=total, initial=output.done, unit="line", disable=args.quiet, file=sys.stderr) as bar:
                output.bar = bar
                await _ask_all(api, first, todo, output, args.window)
        return output.failed


def _todo(path: Path, done: Done, seen: set[str], output: _Output) -> Iterator[tuple[Line, Ask]]:
    """The lines still to be asked; those that cannot be get their error entry on the way."""
    for line in read_lines(path):
        try:
            ask = read_line(line.raw, ENDPOINTS)
            if ask.custom_id in seen:
                raise duplicate(ask)
            seen.add(ask.custom_id)
        except RefusedLineError as refused:
            if line.id in done.lines:
                output.skip()
            else:
                error = {"code": refused.code, "message": refused.message}
                output.write(entry(line, refused.custom_id, None, error), good=False)
            continue
        if ask.custom_id in done.custom_ids:
            output.skip()
        else:
            yield line, ask


async def _ask_all(api: Api, first: tuple[Line, Ask], rest: Iterator[tuple[Line, Ask]], output: _Output, window: int) -> None:
    """Keeps up to `window` requests in flight. The first failure of the API itself stops the rest and is raised."""
    pending: set[asyncio.Task[None]] = set()

    def start(item: tuple[Line, Ask]) -> None:
        pending.add(asyncio.create_task(_ask(api, *item, output)))

    try:
        start(first)
        while True:
            while len(pending) < window and (item := next(rest, None)) is not None:
                start(item)
            if not pending:
                return
            finished, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in finished:
                task.result()
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def _ask(api: Api, line: Line, ask: Ask, output: _Output) -> None:
    """Asks one line, patiently while the server is busy or away. A body without a model gets the API's."""
    body = msgspec.json.encode({"model": api.model, **ask.body})
    for pause in (*PAUSES, None):
        problem: PenstockError
        try:
            reply = await api.transport.send("POST", ask.url, body)
            content = await reply.read()
        except ConnectionFailedError as error:
            problem, healthy = error, False
        else:
            healthy = reply.status < 500 or await _healthy(api)
            if healthy and reply.status not in BUSY:
                _record(line, ask, reply.status, reply.headers, content, output)
                return
            problem = PenstockError(complaint(reply.status, content))
        if pause is None or (api.own and not healthy):
            raise PenstockError(f"stopped at {ask.custom_id!r}: {problem}; what is answered is kept, "
                                "run the same command to go on")
        await asyncio.sleep(pause)


async def _healthy(api: Api) -> bool:
    """Whether an answer of 500 is that request's own failure, or the end of the engine behind it."""
    try:
        reply = await api.transport.send("GET", "/health")
        await reply.read()
    except ConnectionFailedError:
        return False
    return reply.status in (200, 404)


def _record(line: Line, ask: Ask, status: int, headers: dict[str, str], content: bytes, output: _Output) -> None:
    try:
        body = msgspec.json.decode(content)
    except msgspec.DecodeError:
        body = {"error": {"message": content.decode("utf-8", "replace")}}
    request_id = headers.get("x-request-id") or (body.get("id") if isinstance(body, dict) else None) or line.id
    response = {"status_code": status, "request_id": request_id, "body": body}
    good = status == 200
    error = None if good else {"code": f"http_{status}", "message": complaint(status, content)}
    output.write(entry(line, ask.custom_id, response, error), good)
