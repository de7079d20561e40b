"""Counters and histograms of a server, as plain numbers. `server/metrics.py` gives them their public names.

Owned by one event loop; nothing here locks. An observation costs well under a microsecond, so every token may be observed."""

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

from penstock.core.request import Request, Timings

FIRST_TOKEN_SECONDS = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
                       640.0, 2560.0)
TOKEN_SECONDS = (.001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
                 80.0)
REQUEST_SECONDS = (.3, .5, .8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
                   1920.0, 7680.0)
"""Bucket bounds in seconds, vLLM's, so that dashboards made for it fit; between tokens three finer ones are added."""


SMALL_COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0)


def token_bounds(longest: int) -> tuple[float, ...]:
    """Bucket bounds for counts of tokens: 1, 2, 5, 10, ... up to `longest`."""
    steps = (step * 10**power for power in range(len(str(longest))) for step in (1, 2, 5))
    return tuple(float(step) for step in steps if step <= longest) or (1.0,)


class Histogram:
    """Counts of values by upper bound, and their sum. `counts` has one entry more than `bounds`, for larger values."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound as text, values at or below it), the last one for "+Inf"."""
        return list(zip((*map(str, self.bounds), "+Inf"), map(float, accumulate(self.counts)), strict=True))


class Figures:
    """Everything that one frontend counts, over its whole life."""

    def __init__(self, max_model_len: int) -> None:
        tokens = token_bounds(max_model_len)
        self.prompt_tokens = self.generation_tokens = 0
        self.finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        """Sequences by why they ended."""
        self.refused = 0
        self.preemptions = Histogram(SMALL_COUNTS)
        self.first_token = Histogram(FIRST_TOKEN_SECONDS)
        self.between_tokens = Histogram(TOKEN_SECONDS)
        self.per_token = Histogram(TOKEN_SECONDS)
        self.end_to_end = Histogram(REQUEST_SECONDS)
        self.queue = Histogram(REQUEST_SECONDS)
        self.prefill = Histogram(REQUEST_SECONDS)
        self.decode = Histogram(REQUEST_SECONDS)
        self.inference = Histogram(REQUEST_SECONDS)
        self.prompt_lengths = Histogram(tokens)
        self.computed_prompts = Histogram(tokens)
        """Prompt tokens that were not cached."""
        self.output_lengths = Histogram(tokens)
        self.max_tokens = Histogram(tokens)
        self.sequences = Histogram(SMALL_COUNTS)
        self.step_tokens = Histogram(2.0**power for power in range(15))
        """Tokens of a step: those of prompts that were computed with it, and those generated."""

    def started(self, request: Request) -> None:
        """Counts a request that was submitted."""
        self.prompt_tokens += len(request.prompt_ids)
        self.prompt_lengths.observe(len(request.prompt_ids))
        self.sequences.observe(request.params.n)
        if request.params.max_tokens is not None:
            self.max_tokens.observe(request.params.max_tokens)

    def ended(self, timings: Timings) -> None:
        """Counts where the time of a sequence went that had a row."""
        self.preemptions.observe(timings.preemptions)
        self.queue.observe(max(0.0, timings.first_scheduled - timings.arrival))
        self.inference.observe(max(0.0, timings.finished - timings.first_scheduled))
        if timings.first_token:
            self.prefill.observe(max(0.0, timings.first_token - timings.first_scheduled))
            self.decode.observe(max(0.0, timings.finished - timings.first_token))
