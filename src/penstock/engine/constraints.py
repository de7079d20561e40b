"""Constrained requests on their way into an engine: each waits beside the queue until its grammar is compiled."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from penstock.checkpoint import resolve_folder
from penstock.config.schema import EngineOptions
from penstock.core.errors import RequestError
from penstock.core.request import EngineStats, Request, Update
from penstock.grammar.compiling import Compiler
from penstock.grammar.masker import Masker
from penstock.scheduler.scheduler import Scheduler
from penstock.text import Tokenizer

_WAIT_SECONDS = 0.005
"""How long a turn waits for a grammar, if there is nothing else to do."""


def tokenizer_folder(options: EngineOptions, model: Path) -> Path | None:
    """Where the tokenizer of a model is; None if there shall be none."""
    if options.skip_tokenizer_init:
        return None
    return resolve_folder(options.tokenizer) if options.tokenizer else model


class Constraints:
    """One engine's. Used from its thread alone."""

    def __init__(self, scheduler: Scheduler, vocab_size: int, folder: Path | None) -> None:
        """`folder` is the tokenizer's, read once the first grammar comes. None: there is none, and grammars are refused."""
        self._scheduler = scheduler
        self._compiler = Compiler(lambda: None if folder is None else Tokenizer.load(folder), vocab_size)
        self.masker = scheduler.masker = Masker(self._compiler, vocab_size, scheduler.propose)
        self._updates: list[Update] = []

    @property
    def busy(self) -> bool:
        return bool(len(self._compiler) or self._updates)

    def hold(self, request: Request) -> bool:
        """Whether the request must wait for its grammar; `admit` hands it to the scheduler then. RequestError if the scheduler
        would refuse it."""
        if request.params.grammar is None:
            return False
        self._scheduler.limit_of(request)
        most = self._scheduler.limits.max_queued
        if len(self._compiler) >= most:
            raise RequestError(f"{len(self._compiler)} requests are waiting for their grammars and at most {most} may "
                               "(--max-num-queued-reqs); try again later", code="queue_full", status=503)
        return self._compiler.add(request)

    def abort(self, ids: Iterable[str]) -> None:
        """Ends requests that wait here; others are ignored."""
        for request in self._compiler.abort(ids):
            self._end(request, "abort", None)

    def admit(self) -> None:
        """Hands requests to the scheduler whose grammars are ready. With nothing else to do, waits for one a moment."""
        if len(self._compiler) and not self._scheduler.busy:
            self._compiler.wait(_WAIT_SECONDS)
        for request, error in self._compiler.ready():
            if error is None:
                try:
                    self._scheduler.add(request, time.time())
                except RequestError as refused:
                    error = refused
            if error is not None:
                self._end(request, "error", error)

    def take_updates(self) -> list[Update]:
        """The ends of requests that never came to the scheduler, since the last call."""
        updates, self._updates = self._updates, []
        return updates

    def count(self, stats: EngineStats) -> None:
        """Fills in the figures of grammars and masks."""
        compiled, masks = self._compiler.stats, self.masker.stats
        stats.grammars_waiting, stats.grammars_compiled = len(self._compiler), compiled.compiled
        stats.grammars_cached, stats.grammar_seconds = compiled.cached, compiled.seconds
        stats.masks, stats.mask_seconds, stats.forced_tokens = masks.masks, masks.seconds, masks.forced

    def close(self) -> None:
        """Stops the threads."""
        self._compiler.close()

    def _end(self, request: Request, reason: str, error: RequestError | None) -> None:
        message, status = (None, 500) if error is None else (error.message, error.status)
        self._updates += [Update(request.id, index, [], finish_reason=reason, error=message, status=status)
                          for index in range(request.params.n)]
