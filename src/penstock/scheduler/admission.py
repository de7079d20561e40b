"""Admission: requests that could never run, or that find the queue full, are refused; waiting ones may pass each other.

Refusals say what would do. Waiting sequences enter in the policy's order. One that has no room for its known context is passed
by what comes after it and fits, but only `PASSES` times: then all wait until it has entered, so nobody starves. One that waits
for others' work (`cache/joining.py`) or for pages on their way holds nobody up.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.errors import RequestError
from penstock.core.layout import CacheLayout
from penstock.core.request import Request
from penstock.core.sequence import Sequence

PASSES = 32
"""How many later sequences may enter before one that has no room."""

TRIES = 8
"""How many sequences without room are tried in one step: each costs a look into the cache."""


@dataclass(frozen=True)
class Limits:
    """Limits of the scheduler. A chunk is never longer than `max_num_batched_tokens`."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queued: int
    vocab_size: int
    step_target: float | None = None
    """Seconds that a step may take while sequences wait for their next token; None cuts no prompt for that."""


class Admission:
    """Checks a request against the limits and the arena."""

    def __init__(self, limits: Limits, layout: CacheLayout) -> None:
        self.limits = limits
        self.longest = min(limits.max_model_len, layout.longest(limits.max_num_batched_tokens) + 1)
        """Prompt plus output that one request can have; the last token of all needs no cache entry."""

    def check(self, request: Request, waiting: int, free_rows: int) -> int:
        """The most tokens, prompt included, that each of the request's sequences may have. RequestError if it can never run, or
        if the queue is full: `waiting` sequences are more than what `free_rows` will take and `max_queued`.

        A request is never refused for its own size, so that an idle server takes any; it may overfill the queue once.
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
        limit = prompt + (request.params.max_tokens or self.longest - prompt)
        if limit > self.longest:
            raise RequestError(f"the prompt has {prompt} tokens and max_tokens is {request.params.max_tokens}; at most "
                               f"{self.longest} fit together, so max_tokens can be {self.longest - prompt}",
                               param="max_tokens", code="context_length_exceeded")
        if waiting >= self.limits.max_queued + free_rows and not (request.part or request.follows):
            raise RequestError(f"{waiting} requests are waiting and at most {self.limits.max_queued} may "
                               "(--max-num-queued-reqs); try again later", code="queue_full", status=503)
        return limit

    def hold(self, blocked: list[Sequence]) -> bool:
        """Whether those behind the sequences that had no room in this step must wait, too."""
        return len(blocked) >= TRIES or blocked[-1].passed >= PASSES

    def passed(self, blocked: list[Sequence]) -> None:
        """One that came later has entered before these."""
        for sequence in blocked:
            sequence.passed += 1
