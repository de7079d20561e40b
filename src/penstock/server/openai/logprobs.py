"""Log probabilities in the shapes that clients know: OpenAI's for chat, its older one for completions, vLLM's for prompts.

Each token's entry is encoded immediately. Otherwise a million small dicts would be encoded in one uninterruptible call, and the
garbage collector would scan them until then."""

from collections.abc import Sequence
from typing import Any

from msgspec import Raw

from penstock.core.request import TokenLogprobs
from penstock.server.openai.protocol import GenerationFields
from penstock.server.respond import encode
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
        if self._tokenizer is None:
            return f"token_id:{token}"
        return self._tokenizer.token_text(token)

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
