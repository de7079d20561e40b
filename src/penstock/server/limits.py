"""Limits of one request and of one tenant's requests together, checked before any work is done.

Lengths of single lists and strings are in the types of the protocol, where the served schema shows them; what a connection may
cost is in `connections.py`. Endpoints inherit this: `BodyReader` checks the raw body, `Limits.work` what it asks for."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from penstock.config.schema import ServerOptions
from penstock.core.errors import RequestError
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.server.keys import Key

_PIECE = 64 << 10
"""Bytes that are scanned at a time: well below a millisecond, between which other threads run."""

CHARACTERS_A_TOKEN = 16
"""A text with more characters per token of the context than this is refused untokenized; few texts have half as many."""

LEAST_TEXT = 1 << 20
"""Characters that are tokenized however short the context is."""

_DEPTH = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_KEPT = b'"[]{},'
_DROPPED = bytes(set(range(256)) - set(_KEPT))


class Limits:
    """One server's limits, and the bytes in flight that count against them."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.body_bytes = 0
        """Bytes of all bodies that are being received."""

    # -- the raw body

    def check_json(self, data: bytes) -> None:
        """RequestError for a body that is nested too deeply or has too many values. Bodies that are no JSON may pass."""
        depth, values = measure(data, self.options.max_json_depth, self.options.max_json_values)
        if depth > self.options.max_json_depth:
            raise RequestError(f"the body is nested more than {self.options.max_json_depth} levels deep (--max-json-depth)",
                               code="invalid_json")
        if values > self.options.max_json_values:
            raise RequestError(f"the body has more than {self.options.max_json_values:,} values (--max-json-values); send less "
                               "in one request", code="request_too_large", status=413)

    @contextlib.contextmanager
    def receiving(self) -> Iterator[Callable[[int], None]]:
        """Accounts for a body while it arrives: gives a function that counts more received bytes, and raises RequestError 413
        if the body is too large, 503 if all bodies together are."""
        size = 0

        def add(count: int) -> None:
            nonlocal size
            size += count
            self.body_bytes += count
            if size > self.options.max_body_bytes:
                raise too_large("more", self.options.max_body_bytes)
            if self.body_bytes > self.options.max_receiving_bytes and size > _PIECE:
                raise RequestError(f"bodies of {self.options.max_receiving_bytes:,} bytes are being received, which is the "
                                   "most (--max-receiving-bytes); try again in a moment", code="overloaded", status=503)

        try:
            yield add
        finally:
            self.body_bytes -= size

    # -- what it asks for

    def work(self, prompts: int, params: SamplingParams) -> None:
        """RequestError for more answers, or more log probabilities a step, than one request may ask for."""
        sequences = prompts * max(params.n, params.beam_width)
        if sequences > self.options.max_request_sequences:
            raise RequestError(f"{prompts} prompts times n = {max(params.n, params.beam_width)} are {sequences} answers; at "
                               f"most {self.options.max_request_sequences} are possible in one request "
                               "(--max-request-sequences)", param="n")
        scores = prompts * (params.n * (1 + (params.logprobs or 0)) + (1 + (params.prompt_logprobs or 0)))
        # --max-logprobs bounds the scores of one answer.
        if scores > self.options.max_request_scores and prompts * params.n > 1:
            raise RequestError(f"{prompts} prompts times n = {params.n} times log probabilities are {scores} for each token; "
                               f"at most {self.options.max_request_scores} are possible in one request "
                               "(--max-request-scores)", param="logprobs")

    def check_text(self, characters: int, longest: int, param: str = "prompt") -> None:
        """RequestError for a text too long for `longest` tokens: tokenizing takes a hundred bytes of memory a character."""
        most = self.options.max_text_characters or max(LEAST_TEXT, CHARACTERS_A_TOKEN * longest)
        if characters > most:
            raise RequestError(f"the text has {characters:,} characters; at most {most:,} are possible where the context has "
                               f"{longest:,} tokens (--max-text-characters)", param=param, code="context_length_exceeded")

    def check_tenant(self, in_flight: int, requests: Sequence[Request], key: Key | None = None) -> None:
        """RequestError 429 if these requests exceed the limit of a tenant, or of its `key`, with `in_flight` prompt tokens."""
        tokens = sum(len(request.prompt_ids) for request in requests)
        most = self.options.max_tenant_tokens if key is None or key.max_tokens is None else key.max_tokens
        # One request alone is always possible: its own size has other limits.
        if in_flight and in_flight + tokens > most:
            raise RequestError(f"your prompts in flight have {in_flight:,} tokens, and this request {tokens:,}; at most "
                               f"{most:,} are possible together (--max-tenant-tokens); try again when some have ended",
                               code="rate_limit_exceeded", status=429)


def too_large(size: str, most: int) -> RequestError:
    """The refusal of a body for its size."""
    return RequestError(f"the body has {size}, at most {most:,} bytes are possible (--max-body-bytes)",
                        code="request_too_large", status=413)


def measure(data: bytes, most_depth: int, most_values: int) -> tuple[int, int]:
    """(depth, values) of a JSON text, counted without decoding it. Stops where one passes its limit."""
    depth = deepest = values = start = 0
    inside = 0
    """1 inside a string."""
    while start < len(data) and deepest <= most_depth and values <= most_values:
        end = start + _PIECE
        piece = data[start:end]
        # An escape is not cut in two.
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece += data[end:end + 1]
        start += len(piece)
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.translate(None, _DROPPED).split(b'"')
        outside = b"".join(parts[inside::2])
        inside ^= (len(parts) - 1) & 1
        brackets = outside.translate(None, b",")
        values += len(outside) - outside.count(b"]") - outside.count(b"}")
        if brackets:
            levels = list(accumulate(map(_DEPTH.__getitem__, brackets), initial=depth))
            deepest, depth = max(deepest, *levels), levels[-1]
    return deepest, values
