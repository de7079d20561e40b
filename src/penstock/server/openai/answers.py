"""The common part of answers that have choices: usage, the accumulated choices, and the merging of deltas. Log probabilities
have the shapes that clients know: OpenAI's for chat, its older one for completions, vLLM's for prompts.

Each token's entry is encoded immediately. Otherwise a million small dicts would be encoded in one uninterruptible call, and the
garbage collector would scan them until then."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

import penstock
from penstock.core.request import EngineInfo, Request, TokenLogprobs
from penstock.core.service import shown
from penstock.engine.ledger import rounded
from penstock.engine.outputs import Delta
from penstock.server.openai.protocol import GenerationFields
from penstock.server.respond import Frame, encode
from penstock.server.state import State
from penstock.text import Tokenizer

LEAST = -9999.0
"""Represents minus infinity, which JSON cannot express; OpenAI's choice."""


class Namer:
    """Names tokens in answers: by their text, or as "token_id:N" if the request asks for that or there is no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool) -> None:
        self._tokenizer = None if as_ids else tokenizer
        self._bytes_of = tokenizer.token_bytes if tokenizer else None
        self._exact: dict[int, str] = {}

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self._tokenizer is None else self._tokenizer.token_text(token)

    def exact_name(self, token: int) -> str:
        """The text, or the bytes spelled out where they are no text: distinct where the bytes are."""
        name = self._exact.get(token)
        if name is None:
            raw = None if self._tokenizer is None else self._tokenizer.token_bytes(token)
            try:
                name = f"token_id:{token}" if raw is None else raw.decode()
            except UnicodeDecodeError as error:
                name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in error.object)
            self._exact[token] = name
        return name

    def raw(self, token: int) -> list[int] | None:
        return list(self._bytes_of(token)) if self._bytes_of else None


def namer(state: State, body: GenerationFields) -> Namer:
    """The Namer of an answer: as the request asks, by default as the server option return_tokens_as_token_ids says."""
    wanted = body.return_tokens_as_token_ids
    return Namer(state.llm.tokenizer, state.options.return_tokens_as_token_ids if wanted is None else wanted)


def chat_content(lines: list[TokenLogprobs], namer: Namer) -> list[Raw]:
    """`choices[].logprobs.content` of a chat completion."""

    def entry(token: int, value: float) -> dict[str, Any]:
        return {"token": namer.name(token), "logprob": max(value, LEAST), "bytes": namer.raw(token)}

    return [Raw(encode({**entry(line.ids[0], line.logprobs[0]),
                        "top_logprobs": [entry(*pair) for pair in zip(line.ids[1:], line.logprobs[1:], strict=True)]}))
            for line in lines]


def completion_logprobs(ids: list[int], offsets: list[int], lines: Sequence[TokenLogprobs | None],
                        namer: Namer) -> dict[str, Any]:
    """`choices[].logprobs` of a completion. `lines` has None for a token without a score, as the first one of a prompt is."""

    def top(line: TokenLogprobs) -> Raw:
        found: dict[str, float] = {}
        for token, value in zip(line.ids, line.logprobs, strict=True):
            found.setdefault(namer.exact_name(token), max(value, LEAST))
        return Raw(encode(found))

    return {"text_offset": offsets, "tokens": [namer.exact_name(token) for token in ids],
            "token_logprobs": [None if line is None else max(line.logprobs[0], LEAST) for line in lines],
            "top_logprobs": [None if line is None else top(line) for line in lines]}


def prompt_entries(lines: list[TokenLogprobs], namer: Namer) -> list[Raw | None]:
    """vLLM's `prompt_logprobs`: for each prompt token, {id: {logprob, rank, decoded_token}}; null for the first."""
    return [None, *(Raw(encode({str(token): {"logprob": max(value, LEAST), "rank": rank, "decoded_token": namer.name(token)}
                                for token, value, rank in zip(line.ids, line.logprobs, line.ranks, strict=True)}))
                    for line in lines)]


class Head(msgspec.Struct):
    """The first fields of an answer, and of each of its events."""

    id: str
    created: int
    model: str


class PromptDetails(msgspec.Struct):
    cached_tokens: int = 0
    audio_tokens: int = 0
    cached_tokens_by_tier: dict[str, int] = {}
    """Penstock's extension: the same by cache tier (device, host, disk, remote)."""


class CompletionDetails(msgspec.Struct):
    reasoning_tokens: int = 0
    """Tokens of a chat that were read as reasoning."""
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    """Drafted tokens, as those below; `prediction` is one way to draft."""
    rejected_prediction_tokens: int = 0
    acceptance_length: float | UnsetType = UNSET
    """Penstock's extension, where drafts were verified: tokens for each step that did, its own one included."""


class Usage(msgspec.Struct):
    """Tokens of all choices together. A prompt counts once, whatever `n` is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


def fingerprint(info: EngineInfo | None) -> str | None:
    """`system_fingerprint`: a hash of version, model, dtype and kernels. With equal fingerprints a seed gives equal answers."""
    if info is None:
        return None
    facts = (penstock.__version__, info.model, info.architecture, info.dtype, info.device, *map(tuple, info.kernels))
    return "fp_" + blake2b(repr(facts).encode(), digest_size=5).hexdigest()


class Growth(msgspec.Struct):
    text: list[str] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    started: bool = False


class ChoicesAnswer(ABC):
    """An answer of choices, `n` for each of its requests, numbered consecutively."""

    def __init__(self, name: str, model: str, requests: Sequence[Request], body: GenerationFields, namer: Namer,
                 info: EngineInfo | None) -> None:
        """`name` is the answer's id, `info` is of the engine that gives it."""
        self.id = name
        self.model = model
        self.created = int(time.time())
        self.system_fingerprint = fingerprint(info)
        self.service_tier = None if body.service_tier is None else shown(requests[0].tier)
        """The class that served it, if the request has the field."""
        self.requests = requests
        self.namer = namer
        self.n = requests[0].params.n
        self.growths = [Growth() for _ in range(self.n * len(requests))]
        self.first = {request.id: place * self.n for place, request in enumerate(requests)}
        self.prompt_tokens = sum(len(request.prompt_ids) for request in requests)
        self.completion_tokens = self.cached_tokens = 0
        self.cached_by_tier: dict[str, int] = {}
        self.details = CompletionDetails()
        self._drafts = 0
        self.want_ledger = bool(body.include_ledger)
        self.ledger: dict[str, Any] | UnsetType = UNSET
        """Of the choice that ended last, if it is wanted."""
        self.want_ids = bool(body.return_token_ids)
        self.frames: dict[int, Frame] = {}
        """Of each choice, for events that tell a text and nothing else."""
        options = body.stream_options
        self.usage_at_end = bool(options and options.include_usage)
        self.usage_always = self.usage_at_end and bool(options and options.continuous_usage_stats)

    def events(self, deltas: list[Delta]) -> bytes:
        if len(deltas) == 1:
            return self.event(self.choice_of(deltas[0]), deltas[0])
        parts: dict[int, list[Delta]] = {}
        for delta in deltas:
            parts.setdefault(self.choice_of(delta), []).append(delta)
        return b"".join([self.event(choice, _joined(found), found) for choice, found in parts.items()])

    @abstractmethod
    def event(self, choice: int, delta: Delta, parts: Sequence[Delta] = ()) -> bytes:
        """The events of what is new of one choice; may be empty. `parts` are what `delta` was joined from."""

    def add(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            growth = self.growths[self.choice_of(delta)]
            self.count(delta)
            growth.text.append(delta.text)
            growth.token_ids += delta.token_ids
            if delta.logprobs:
                growth.logprobs += delta.logprobs
            if delta.finish_reason is not None:
                growth.finish_reason, growth.stop_reason = delta.finish_reason, delta.stop_reason

    def choice_of(self, delta: Delta) -> int:
        """The index of a delta's choice. Adds its cached tokens to the usage, and keeps the scores of its prompt."""
        if delta.prompt_logprobs is not None:
            self.growths[self.first[delta.request_id]].prompt_logprobs = delta.prompt_logprobs
        if delta.cached_tokens and delta.index == 0:
            self.cached_tokens += delta.cached_tokens
            for tier, tokens in (delta.cached_by_tier or {}).items():
                self.cached_by_tier[tier] = self.cached_by_tier.get(tier, 0) + tokens
        return self.first[delta.request_id] + delta.index

    def count(self, delta: Delta) -> None:
        """Adds a delta's tokens to the usage. Called when they are sent, so that no event counts the tokens of later ones."""
        self.completion_tokens += len(delta.token_ids)
        timings = delta.timings
        if timings is not None and timings.drafts:
            self._drafts += timings.drafts
            self.details.accepted_prediction_tokens += timings.accepted_tokens
            self.details.rejected_prediction_tokens += timings.drafted_tokens - timings.accepted_tokens
            self.details.acceptance_length = round(1 + self.details.accepted_prediction_tokens / self._drafts, 3)
        if self.want_ledger and delta.ledger is not None:
            self.ledger = rounded(delta.ledger)

    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.completion_tokens, self.prompt_tokens + self.completion_tokens,
                     PromptDetails(self.cached_tokens, cached_tokens_by_tier=self.cached_by_tier), self.details)

    def chunk_usage(self) -> Usage | UnsetType | None:
        """The `usage` of an event before the last: the usage so far, null, or absent, as the request wants it."""
        return self.usage() if self.usage_always else None if self.usage_at_end else UNSET


def _joined(parts: list[Delta]) -> Delta:
    """Consecutive deltas of a choice as one."""
    if len(parts) == 1:
        return parts[0]
    return msgspec.structs.replace(
        parts[-1], text="".join([one.text for one in parts]), token_ids=[token for one in parts for token in one.token_ids],
        logprobs=[line for one in parts for line in one.logprobs or ()] or None)
