"""Admission: refuses requests that can never run or that find the queue full, and lets waiting sequences overtake others.

A refusal says what would be accepted. Waiting sequences enter in the policy's order. Later sequences that fit may overtake one
without room for its known context, but only `PASSES` times, so that no sequence starves. A sequence that waits for another's
prefill (`cache/joining.py`) or for pages being loaded does not block others.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.errors import RequestError
from penstock.core.layout import CacheLayout
from penstock.core.request import Request
from penstock.core.sequence import Sequence

PASSES = 32
"""Maximum number of later sequences that may overtake a sequence without room."""

TRIES = 8
"""Maximum number of sequences without room tried per step, because each try costs a cache lookup."""


@dataclass(frozen=True)
class Limits:
    """Limits of the scheduler. A chunk is never longer than `max_num_batched_tokens`."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queued: int
    vocab_size: int
    max_adapters: int = 0
    """Adapters that the device holds at once."""
    step_target: float | None = None
    """Target step time in seconds while sequences decode; None: prompts are not cut into chunks for it."""
    stages: int = 1
    """Pipeline stages, each of which computes another step."""


class Admission:
    """Checks a request against the limits and the arena."""

    def __init__(self, limits: Limits, layout: CacheLayout) -> None:
        self.limits = limits
        self.longest = min(limits.max_model_len, layout.longest(limits.max_num_batched_tokens) + 1)
        """Prompt plus output that one request can have; the last token of all needs no cache entry."""

    def check(self, request: Request, waiting: int, free_rows: int) -> int:
        """Returns the maximum tokens, prompt included, of each of the request's sequences. RequestError if the request can
        never run, or if the queue is full: `waiting` >= `max_queued` + `free_rows`.

        The number of a request's own sequences does not count, so an idle server accepts any; it may overfill the queue once.
        """
        prompt = len(request.prompt_ids)
        if prompt == 0:
            raise RequestError("the prompt has no tokens", param="prompt", code="invalid_value")
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < self.limits.vocab_size:
            raise RequestError(f"the prompt names a token outside the vocabulary (0 to {self.limits.vocab_size - 1})",
                               param="prompt", code="invalid_value")
        if prompt >= self.longest:
            raise RequestError(f"the prompt has {prompt} tokens; with one token of output the most is {self.longest - 1}",
                               param="prompt", code="context_length_exceeded")
        limit = prompt + (1 if request.pool is not None else request.params.max_tokens or self.longest - prompt)
        if limit > self.longest:
            raise RequestError(f"the prompt has {prompt} tokens and max_tokens is {request.params.max_tokens}; at most "
                               f"{self.longest} fit together, so max_tokens can be {self.longest - prompt}",
                               param="max_tokens", code="context_length_exceeded")
        if waiting >= self.limits.max_queued + free_rows and not (request.part or request.follows):
            raise RequestError(f"{waiting} requests are waiting and at most {self.limits.max_queued} may "
                               "(--max-num-queued-reqs); try again later", code="queue_full", status=503)
        return limit

    def hold(self, blocked: list[Sequence]) -> bool:
        """Whether no further sequence may be tried in this step, given those that had no room."""
        return len(blocked) >= TRIES or blocked[-1].passed >= PASSES

    def passed(self, blocked: list[Sequence]) -> None:
        """Counts that a later sequence has overtaken these."""
        for sequence in blocked:
            sequence.passed += 1
