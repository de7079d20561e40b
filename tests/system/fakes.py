"""An engine without a model, whose faults are ordered by the first token of a prompt. Loaded by the real engine process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from penstock.config.schema import EngineOptions
from penstock.core.errors import ConfigError, RequestError
from penstock.core.request import EngineInfo, EngineStats, Request, TierStats, Timings, TokenLogprobs, Update

FAIL, BREAK, STICK, SLOW, REFUSE, CRASH_ON_SUBMIT, LATE, LONG = 500, 501, 502, 503, 504, 505, 506, 507
"""First prompt tokens: logits not finite; the loop raises; a step never ends; 20 ms a step; queue full; submit raises; no
token for LATE_SECONDS; steps of LONG_SECONDS on another thread."""

LATE_SECONDS, LONG_SECONDS = 1.5, 1.0

NAME = "tests.system.fakes:FakeEngine"


class FakeEngine:
    """Token i of every sequence is 259 + (i + index) % 200, so its text is known; everything runs at once."""

    def __init__(self, options: EngineOptions, progress=None) -> None:
        if options.seed == 13:
            raise ConfigError("seed 13 cannot be had; take another")
        if options.seed == 14:
            raise ValueError("a bug at start")
        if progress:
            progress(1, 2)
            progress(2, 2)
        self.info = EngineInfo(model=options.model, architecture="Fake", vocab_size=512,
                               max_model_len=options.max_model_len or 512, max_num_seqs=256,
                               max_num_batched_tokens=512, page_size=16, kv_tokens=4096, pages_total=256,
                               dtype="float32", device="cpu", weight_bytes=1, step_bytes=1, kv_bytes=1)
        self.live: dict[tuple[str, int], tuple[Request, list[int], Timings]] = {}
        self.news: list[Update] = []
        self.resets = 0
        """Calls of reset_prefix_cache; the third fails."""
        self._stats = EngineStats(pages_total=256,
                                  tiers=[TierStats("device", 4096, 1024, 3, 17, 5, 2), TierStats("host", 1 << 20)])

    def submit(self, request: Request) -> None:
        first = request.prompt_ids[0]
        if first == REFUSE:
            raise RequestError("the queue is full: 0 requests wait, the most is 0", code="queue_full", status=503)
        if first == CRASH_ON_SUBMIT:
            raise ZeroDivisionError("a bug in submit")
        for index in range(request.params.n):
            self.live[request.id, index] = (request, [], Timings(arrival=request.arrival, first_scheduled=time.time()))

    def abort(self, ids: Iterable[str]) -> None:
        for name in ids:
            for key in [k for k in self.live if name in (k[0], f"{k[0]}/{k[1]}")]:
                del self.live[key]
                self.news.append(Update(*key, [], finish_reason="abort", timings=Timings()))

    def undecided(self, _request_id: str) -> bool:
        return False

    def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return self.resets < 3

    @property
    def busy(self) -> bool:
        return bool(self.live or self.news)

    @property
    def writing(self) -> bool:
        return False

    def turn(self, meanwhile: Callable[[Future[None]], None] | None = None) -> list[Update]:
        news, self.news = self.news, []
        for key, (request, tokens, timings) in list(self.live.items()):
            first = request.prompt_ids[0]
            if first == BREAK:
                raise RuntimeError("the step broke")
            if first == STICK:
                time.sleep(3600)
            if first == LONG and meanwhile is not None:
                step: Future[None] = Future()
                threading.Timer(LONG_SECONDS, step.set_result, [None]).start()
                meanwhile(step)
            if first == SLOW:
                time.sleep(0.02)
            if first == LATE and time.time() - request.arrival < LATE_SECONDS:
                time.sleep(0.01)
                continue
            if first == FAIL and len(tokens) == 2:
                news.append(Update(*key, [], finish_reason="error", error="logits not finite", timings=timings))
                del self.live[key]
                continue
            token = 259 + (len(tokens) + key[1]) % 200
            tokens.append(token)
            timings.first_token = timings.first_token or time.time()
            done = len(tokens) >= (request.params.max_tokens or 16)
            wanted = request.params.logprobs
            logprobs = None if wanted is None else [TokenLogprobs([token, *range(300, 300 + wanted)], [-0.5] * (1 + wanted),
                                                                  list(range(1, wanted + 2)))]
            news.append(Update(*key, [token], finish_reason="length" if done else None, logprobs=logprobs,
                               timings=timings if done else None))
            if done:
                timings.finished = time.time()
                del self.live[key]
        self._stats.steps += 1
        return news

    def stats(self) -> EngineStats:
        self._stats.time = time.time()
        self._stats.running = len(self.live)
        return self._stats

    def close(self) -> None:
        pass
