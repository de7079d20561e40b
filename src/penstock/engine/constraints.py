"""Admission of constrained requests: each waits outside the scheduler's queue until its grammar is compiled."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from penstock.core.errors import RequestError
from penstock.core.plan import Ints
from penstock.core.request import EngineStats, Request
from penstock.grammar.compiling import Compiler
from penstock.grammar.masker import Masker
from penstock.scheduler.scheduler import Scheduler
from penstock.text import Tokenizer

_WAIT_SECONDS = 0.005
"""The longest that an otherwise idle turn waits for a grammar."""


class Constraints:
    """The waiting constrained requests of one engine. Used only from the engine's thread."""

    def __init__(self, scheduler: Scheduler, vocab_size: int, folder: Path | None, room: Callable[[int, int], Ints]) -> None:
        """`folder`: the tokenizer's, read when the first grammar arrives; None refuses grammars. `room`: as in `Masker`."""
        self._scheduler = scheduler
        self._compiler = Compiler(lambda: None if folder is None else Tokenizer.load(folder), vocab_size)
        self.masker = scheduler.masker = Masker(self._compiler, vocab_size, scheduler.drafts.expect, scheduler.batch.spare,
                                                room)

    @property
    def busy(self) -> bool:
        return bool(self.requests)

    @property
    def requests(self) -> dict[str, Request]:
        """The requests that wait for their grammars, by id."""
        return self._compiler.waiting

    def hold(self, request: Request) -> bool:
        """Takes a request that must wait for its grammar, and returns True; `admit` passes it to the scheduler later. False if
        the request need not wait. RequestError if the scheduler would refuse it."""
        if request.params.grammar is None:
            return False
        self._scheduler.admission.check_held(request, len(self.requests), "grammars")
        return self._compiler.add(request)

    def abort(self, ids: Iterable[str]) -> None:
        """Ends requests that wait here; others are ignored."""
        for request in self._compiler.abort(ids):
            self._scheduler.end(request, "abort")

    def admit(self) -> None:
        """Passes requests whose grammars are ready to the scheduler. Waits briefly for one if there is nothing else to do."""
        if self.requests and not self._scheduler.busy:
            self._compiler.news.wait(_WAIT_SECONDS)
        for request, error in self._compiler.ready():
            if error is None:
                try:
                    self._scheduler.add(request, time.time())
                except RequestError as refused:
                    error = refused
            if error is not None:
                self._scheduler.end(request, "error", error)

    def count(self, stats: EngineStats) -> None:
        compiler, masker = self._compiler, self.masker
        stats.grammars_waiting, stats.grammars_compiled = len(self.requests), compiler.compiled
        stats.grammars_cached, stats.grammar_seconds = compiler.cached, compiler.seconds
        stats.masks, stats.mask_seconds, stats.forced_tokens = masker.masked, masker.seconds, masker.forced

    def close(self) -> None:
        self._compiler.close()
