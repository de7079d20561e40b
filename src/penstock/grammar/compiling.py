"""Compiles grammars for the model's vocabulary on background threads.

Requests wait here until their grammar is ready; others continue, because llguidance compiles without the GIL."""

import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from penstock.core.errors import PenstockError, RequestError, UnsupportedError
from penstock.core.request import Request
from penstock.grammar.definition import limits
from penstock.grammar.numbers import Numbers
from penstock.grammar.vocabulary import build, texts
from penstock.text import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_THREADS = 2
_NICE = 10
"""Nice value of the compile threads: they get about a tenth of the processor time of a thread that runs steps."""
_LANES, _ROWS_A_LANE = 64, 2
"""The most matchers of one grammar, and how many sequences ask for each before another one is compiled. A mask of a bounded
string takes 1.4 ms with 128,000 tokens, others 0.03: threads share them evenly only where few wait for one lock."""
_CACHED = 256
"""Maximum number of cached compiled grammars."""
_CACHED_CHARACTERS = 8_000_000
"""Maximum total length of the cached grammars' texts, a proxy for their memory."""


class _Compiled(msgspec.Struct):
    """A grammar's matchers. A copy shares its lexer, and the lock on it, with the matcher that it was copied from: masks of
    rows that follow one grammar are computed in parallel only if the rows come from several."""

    matchers: "list[LLMatcher]"
    asked: int = 1
    """The number of matchers, those that are being compiled included."""
    rows: int = 0
    """Sequences that have asked for the grammar."""
    dealt: int = 0
    """Copies made."""


class Compiler:
    """The compiler of one engine. Only the thread of the engine's loop calls it; the compiling itself runs on other threads."""

    def __init__(self, load: Callable[[], Tokenizer | None], vocab_size: int) -> None:
        """`load` returns the tokenizer; it is called on a thread when the first grammar arrives."""
        self.compiled = self.cached = 0
        """Grammars compiled, and found in the cache, since the engine started."""
        self.seconds = 0.0
        self._load = load
        self._vocab_size = vocab_size
        self._pool: ThreadPoolExecutor | None = None
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}
        self.numbers = Numbers(())
        """Of the vocabulary, once a grammar is compiled."""
        self._lock = threading.Lock()
        self._lanes = _LANES if parallel() else 1
        self._done: OrderedDict[tuple[str, tuple[int, ...]], _Compiled] = OrderedDict()
        self._characters = 0
        self._running: dict[tuple[str, tuple[int, ...]], Future[LLMatcher]] = {}
        self.waiting: dict[str, Request] = {}
        self.news = threading.Event()
        """Set while a grammar is ready."""

    def add(self, request: Request) -> bool:
        """Accepts a request that may need a grammar. Returns False if it need not wait: it has no grammar, or a cached one."""
        if request.params.grammar is None:
            return False
        key = _key(request)
        if key in self._done:
            self._done.move_to_end(key)
            self.cached += 1
            self._spread(request)
            return False
        self.waiting[request.id] = request
        if key not in self._running:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, "penstock-grammar", _yield_to_steps)
            self._running[key] = future = self._pool.submit(self._compile, *key)
            future.add_done_callback(lambda _: self.news.set())
        return True

    def abort(self, ids: Iterable[str]) -> list[Request]:
        """Removes requests by id and returns them. A grammar that no request waits for any more is not compiled."""
        gone = [self.waiting.pop(name) for name in ids if name in self.waiting]
        for key in {_key(request) for request in gone} - {_key(request) for request in self.waiting.values()}:
            if key in self._running and self._running[key].cancel():
                del self._running[key]
        return gone

    def ready(self) -> list[tuple[Request, RequestError | None]]:
        """Returns the requests that no longer wait, each with the error that prevents serving it, if any."""
        if not self.news.is_set():
            return []
        self.news.clear()
        errors: dict[tuple[str, tuple[int, ...]], RequestError | None] = {}
        for key, future in list(self._running.items()):
            if future.done():
                del self._running[key]
                errors[key] = self._take(key, future)
        over = [request for request in self.waiting.values() if _key(request) in errors]
        for request in over:
            del self.waiting[request.id]
            self._spread(request)
        return [(request, errors[_key(request)]) for request in over]

    def matcher(self, request: Request) -> "tuple[LLMatcher | None, int]":
        """Returns a new matcher of the request's grammar, if it has one, and a number that is the same where the lock is."""
        if request.params.grammar is None:
            return None, 0
        key = _key(request)
        if key not in self._done:
            # The cache evicted it while the request waited for a row.
            self._keep(key, self._compile(*key))
        found = self._done[key]
        found.dealt += 1
        lane = found.dealt % len(found.matchers)
        return found.matchers[lane].deep_copy(), lane

    def _spread(self, request: Request) -> None:
        """Compiles a grammar again if many sequences follow it."""
        key = _key(request)
        found = self._done.get(key)
        if found is None or self._pool is None:
            return
        found.rows += request.params.n
        while found.asked < min(self._lanes, -(-found.rows // _ROWS_A_LANE)):
            found.asked += 1
            self._pool.submit(lambda: found.matchers.append(self._compile(*key)))

    def close(self) -> None:
        """Stops the threads after the grammars that they are compiling."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _take(self, key: tuple[str, tuple[int, ...]], future: "Future[LLMatcher]") -> RequestError | None:
        try:
            self._keep(key, future.result())
        except RequestError as error:
            return error
        except PenstockError as error:
            return UnsupportedError(f"the answer cannot be constrained: {error}")
        return None

    def _keep(self, key: tuple[str, tuple[int, ...]], matcher: "LLMatcher") -> None:
        self._done[key] = _Compiled([matcher])
        self._characters += len(key[0])
        while len(self._done) > 1 and (len(self._done) > _CACHED or self._characters > _CACHED_CHARACTERS):
            (text, _), _ = self._done.popitem(last=False)
            self._characters -= len(text)

    def _compile(self, grammar: str, eos_ids: tuple[int, ...]) -> "LLMatcher":
        from llguidance import LLMatcher

        tokenizer = self._tokenizer(eos_ids)
        began = time.perf_counter()
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
        # The first mask builds the lexer's tables for the vocabulary.
        matcher.compute_bitmask()
        self.compiled += 1
        self.seconds += time.perf_counter() - began
        if matcher.is_error():
            raise RequestError(f"the grammar cannot be used with this model's vocabulary: "
                               f"{matcher.get_error().split('<state>')[0].strip()}", code="unsupported_schema")
        return matcher

    def _tokenizer(self, eos_ids: tuple[int, ...]) -> "LLTokenizer":
        with self._lock:
            if eos_ids not in self._tokenizers:
                tokenizer = self._load()
                if tokenizer is None:
                    raise RequestError("answers cannot be constrained without a tokenizer (skip_tokenizer_init)",
                                       code="no_tokenizer")
                tokens = texts(tokenizer, self._vocab_size)
                self.numbers = Numbers(tokens)
                self._tokenizers[eos_ids] = build(tokenizer, tokens, eos_ids)
            return self._tokenizers[eos_ids]


def parallel() -> bool:
    """Whether llguidance's threads compute masks: of one or two processors the model's own threads need all."""
    return len(os.sched_getaffinity(0)) > 2


def _yield_to_steps() -> None:
    """Lowers this thread's priority, so that compiling does not delay steps on a machine with few processors."""
    with contextlib.suppress(OSError):
        # Platforms without thread priorities refuse this.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _key(request: Request) -> tuple[str, tuple[int, ...]]:
    return request.params.grammar or "", tuple(request.eos_ids)
