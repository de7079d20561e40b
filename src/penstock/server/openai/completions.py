"""POST /v1/completions: prompts as text or token ids, one or many, and the answer in OpenAI's older shape."""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import RequestError, UnsupportedError
from penstock.core.request import EngineInfo, Request as EngineRequest, TokenLogprobs
from penstock.engine.outputs import Delta
from penstock.server.openai.answers import ChoicesAnswer, Growth, Head, Namer, Usage, completion_logprobs, namer, prompt_entries
from penstock.server.openai.echo import Echo, Offsets, echo
from penstock.server.openai.prepare import check_stream, prepare, sampling_params
from penstock.server.openai.protocol import CompletionRequest
from penstock.server.respond import Frame, event, respond
from penstock.server.state import State
from penstock.text import Tokenizer

MAX_PROMPTS = 2048
"""Prompts in one request, as many as OpenAI takes."""


class Choice(msgspec.Struct):
    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_logprobs: list[msgspec.Raw | None] | None = None


class Completion(Head):
    """A whole answer or one streamed event: this API uses one shape for both."""

    choices: list[Choice]
    object: str = "text_completion"
    system_fingerprint: str | None = None
    service_tier: str | None = None
    usage: Usage | UnsetType | None = UNSET
    ledger: dict[str, Any] | UnsetType = UNSET
    kv_transfer_params: UnsetType | None = UNSET


class CompletionAnswer(ChoicesAnswer):
    """Builds the answer to one HTTP request, over all its prompts, from deltas."""

    def __init__(self, name: str, model: str, requests: list[EngineRequest], echoes: list[Echo], body: CompletionRequest,
                 namer: Namer, tokenizer: Tokenizer | None, info: EngineInfo | None) -> None:
        super().__init__(name, model, requests, body, namer, info)
        self.echoes = echoes
        """The echoed prompts; empty without `echo`."""
        self.score_only = body.max_tokens == 0
        """max_tokens is 0: only the prompt is scored. The engine still generates one token, which is not shown."""
        self.want_logprobs = body.logprobs is not None
        self.want_prompt_logprobs = body.prompt_logprobs is not None
        self._plain = not (self.want_logprobs or self.want_ids or self.usage_always or self.score_only)
        self._tokenizer = tokenizer
        """None: an event without text reports that a token was generated."""
        self._offsets: dict[int, Offsets] = {}

    def event(self, index: int, delta: Delta, parts: Sequence[Delta] = ()) -> bytes:
        growth = self.growths[index]
        opening = not growth.started
        self.count(delta)
        if not (delta.text or delta.finish_reason or self.want_logprobs or self.want_ids or (opening and self.echoes)
                or self._tokenizer is None):
            return b""
        growth.started = True
        if self._plain and not (opening or delta.finish_reason):
            frame = self.frames.get(index)
            if frame is None:
                frame = self.frames[index] = Frame(self._completion([Choice(index, "\0")], self.chunk_usage()), "text")
            return frame.event(delta.text)
        choice = self._choice(index, delta.text, delta.token_ids, delta.logprobs or [], opening)
        choice.finish_reason = delta.finish_reason
        if delta.finish_reason:
            choice.stop_reason = delta.stop_reason
        return event(self._completion([choice], self.chunk_usage()))

    def count(self, delta: Delta) -> None:
        super().count(delta)
        if self.score_only:
            self.completion_tokens = 0

    def _choice(self, index: int, text: str, ids: list[int], lines: list[TokenLogprobs], opening: bool) -> Choice:
        """A choice with its next text and tokens; with `opening` those of an echoed prompt precede them."""
        if self.score_only:
            text, ids, lines = "", [], []
        request, choice = self.requests[index // self.n], Choice(index, text)
        if self.want_ids:
            choice.token_ids = ids
            if opening:
                choice.prompt_token_ids = request.prompt_ids
        prompt = self.echoes[index // self.n] if opening and self.echoes else None
        if prompt is not None:
            choice.text = prompt.text + text
        if self.want_logprobs:
            offsets, scored = self._offsets_of(index).of(ids), list[TokenLogprobs | None](lines)
            if prompt is not None:
                ids, offsets = [*request.prompt_ids, *ids], [*prompt.offsets, *offsets]
                # The first token of a prompt has no score.
                scored = [None, *self._prompt_scores(index), *scored]
            choice.logprobs = completion_logprobs(ids, offsets, scored, self.namer)
        return choice

    def _prompt_scores(self, index: int) -> list[TokenLogprobs]:
        return self.growths[index - index % self.n].prompt_logprobs or []

    def _offsets_of(self, index: int) -> Offsets:
        """Text offsets of a choice's generated tokens."""
        if index not in self._offsets:
            place, tokenizer = index // self.n, self._tokenizer
            request = self.requests[place]
            detokenizer = tokenizer.detokenizer(request.params.skip_special_tokens, request.prompt_ids) if tokenizer else None
            self._offsets[index] = Offsets(detokenizer, len(self.echoes[place].text) if self.echoes else 0)
        return self._offsets[index]

    def last_events(self) -> bytes:
        if not (self.usage_at_end or self.want_ledger):
            return b""
        return event(self._completion([], self.usage() if self.usage_at_end else UNSET, self.ledger))

    def _completion(self, choices: list[Choice], usage: Usage | UnsetType | None,
                    ledger: dict[str, Any] | UnsetType = UNSET) -> Completion:
        return Completion(self.id, self.created, self.model, choices, system_fingerprint=self.system_fingerprint,
                          service_tier=self.service_tier, usage=usage, ledger=ledger)

    def whole(self) -> Completion:
        answer = self._completion([self._whole_choice(i, growth) for i, growth in enumerate(self.growths)], self.usage(),
                                  self.ledger)
        answer.kv_transfer_params = None
        return answer

    def _whole_choice(self, index: int, growth: Growth) -> Choice:
        choice = self._choice(index, "".join(growth.text), growth.token_ids, growth.logprobs, True)
        choice.finish_reason, choice.stop_reason = growth.finish_reason, growth.stop_reason
        if not self.want_ids:
            choice.token_ids = choice.prompt_token_ids = None
        if self.want_prompt_logprobs:
            choice.prompt_logprobs = prompt_entries(self._prompt_scores(index), self.namer)
        return choice


async def answer(state: State, http: Request, body: CompletionRequest) -> Response:
    """Answers one completion request. RequestError for what cannot be honoured."""
    llm, model, prompts = state.llm, state.admit(body.model), split_prompts(body.prompt)
    check(body)
    params = sampling_params(body, llm.inputs.defaults, body.max_tokens or (1 if body.max_tokens == 0 else None), body.logprobs)
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params = params.replace(prompt_logprobs=body.logprobs)
    special = body.add_special_tokens is not False
    requests = await prepare(state, http, prompts, params, body, add_special_tokens=special)

    def echoed() -> list[Echo]:
        return [echo(llm.tokenizer, prompt, request, special, body.truncate_prompt_tokens is not None,
                     final=body.max_tokens == 0) for prompt, request in zip(prompts, requests, strict=True)]

    tokens = sum(len(request.prompt_ids) for request in requests)
    echoes = await llm.work.run(8 * tokens, echoed) if body.echo else []
    whole = CompletionAnswer(f"cmpl-{body.request_id or http.scope['request_id']}", model, requests, echoes, body,
                             namer(state, body), llm.tokenizer, llm.info)
    return await respond(http, llm.open(requests), whole, bool(body.stream))


def check(body: CompletionRequest) -> None:
    """RequestError for fields that do not go together."""
    check_stream(body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise UnsupportedError(f"best_of cannot be honoured: answers are not ranked; leave it out, or make it n "
                               f"({body.n or 1})", "best_of")
    if body.logprob_token_ids and body.max_tokens == 0:
        raise RequestError("logprob_token_ids are about generated tokens, and max_tokens is 0", param="logprob_token_ids")
    if body.max_tokens == 0 and not body.echo:
        raise RequestError("max_tokens must be at least 1; 0 is only possible with echo", param="max_tokens")


def split_prompts(prompt: str | list[Any], name: str = "prompt") -> list[str | list[int]]:
    """The field `name` as a list of texts and lists of ids. RequestError for an empty list, or one that mixes kinds."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(entry) for entry in prompt}
    if kinds == {int}:
        return [prompt]
    if len(kinds) != 1:
        what = "an empty list" if not prompt else "a mixture of texts, ids and lists"
        raise RequestError(f"{name} is {what}; possible are a text, a list of texts, a list of token ids, a list of such lists",
                           param=name)
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(f"{name} is a list of {len(prompt)}; at most {MAX_PROMPTS} are possible in one request", param=name)
    return list(prompt)
