"""The outputs of one client's requests as they arrive, for a reader on the event loop."""

import asyncio
import time
from collections.abc import Callable

from penstock.engine.outputs import Delta
from penstock.engine.work import Workers


class Stream:
    """Outputs of one or several requests as they arrive. Close it, or iterate it to its end.

    `async for deltas in stream` yields all deltas since the last iteration, at least one. Raises RequestError when a request
    was refused or failed, EngineDeadError when the engine died; the other requests of the stream are then aborted."""

    def __init__(self, work: Workers, drop: "Callable[[Stream], None]") -> None:
        """`work` runs the encoding of long answers; `drop` forgets the stream's open requests and aborts them."""
        self.work = work
        self._drop = drop
        self.taker: Callable[[list[Delta]], bool] | None = None
        """Takes the deltas of a step on the spot, without waking the reader; False where it cannot, and the reader has to."""
        self._deltas: list[Delta] = []
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[bool] | None = None
        self._taken = 0.0
        """When `taker` took something last: time.monotonic()."""
        self.open: set[str] = set()
        """Ids of requests that have not ended."""
        self.unconfirmed: set[str] = set()
        """Ids of requests that the engine may still refuse."""
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.ledger: dict[str, float] = {}
        self.ledger_at = 0.0
        """Where the time of the sequence went that ended last, and when that was: time.time()."""
        self.name, self.owner = "", b""
        """The id by which its client knows it, and whose it is: for `AsyncLLM.abort_named`."""
        self.ends: dict[str, None] = {}
        """The finish reasons in order of appearance; with the totals above for the log."""

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> list[Delta]:
        return await self.next()

    async def next(self, seconds: float | None = None) -> list[Delta]:
        """The next deltas, or an empty list if none arrives within `seconds`. StopAsyncIteration after the end."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if not self.open:
                raise StopAsyncIteration
            if not await self._wait(seconds):
                return []
        deltas, self._deltas = self._deltas, []
        return deltas

    async def admitted(self) -> None:
        """Returns once the engine has accepted all requests. Otherwise raises the error that reading would raise."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if not self.unconfirmed:
                return
            await self._wait(None)

    async def _wait(self, seconds: float | None) -> bool:
        """Waits for `_wake`; False after `seconds` in which nothing came."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiter = waiter
        timer: asyncio.TimerHandle | None = None

        def expire(pause: float) -> None:
            nonlocal timer
            left = self._taken + pause - time.monotonic()
            if left > 0:
                timer = loop.call_later(left, expire, pause)
            elif not waiter.done():
                waiter.set_result(False)

        if seconds is not None:
            timer = loop.call_later(seconds, expire, seconds)
        try:
            return await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def close(self, error: BaseException | None = None) -> None:
        """Aborts the open requests. A waiting reader gets `error` or the stream's end. May be called repeatedly."""
        self._drop(self)
        if self._error is None:
            self._error = error
        self.unconfirmed.clear()
        self._wake()

    def put(self, deltas: list[Delta], now: float = 0.0) -> None:
        """Hands the deltas of a step, made at time.monotonic() `now`, to the reader."""
        if self.taker is not None and not self._deltas and self.taker(deltas):
            self._taken = now
            return
        self._deltas += deltas
        self._wake()

    def confirm(self, request_id: str) -> None:
        """Called when the engine has accepted one of the requests."""
        self.unconfirmed.discard(request_id)
        self._wake()

    def end(self, request_id: str) -> None:
        self.open.discard(request_id)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    async def __aenter__(self) -> "Stream":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
