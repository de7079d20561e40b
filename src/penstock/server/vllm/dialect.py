"""vLLM's own routes as a dialect: tokens in and out, aborting by name, and the operator's routes that are refused here."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import RequestError, UnsupportedError
from penstock.core.request import TokenLogprobs
from penstock.engine.outputs import Delta
from penstock.server.dialect import Route, json_response
from penstock.server.openai.answers import ChoicesAnswer, Usage, chat_content, namer, prompt_entries
from penstock.server.openai.form import OpenAIForm
from penstock.server.openai.prepare import check_stream, prepare, sampling_params
from penstock.server.openai.protocol import MAX_ENTRIES, MAX_IDS, CompletionRequest, Name, ServiceFields, StreamOptions, TokenId
from penstock.server.respond import event, respond

UNREAD = ("detokenize", "output_kind", "skip_reading_prefix_cache", "spaces_between_special_tokens")
"""Fields of vLLM's SamplingParams that change nothing in an answer of tokens."""


class GenerateRequest(ServiceFields, kw_only=True, forbid_unknown_fields=True):
    """POST /inference/v1/generate."""

    token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_IDS)]
    sampling_params: dict[str, Any] = {}
    """As vLLM's SamplingParams; the completions route has the same fields."""
    request_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    features: None = None
    ec_transfer_params: None = None


class TokensChoice(msgspec.Struct):
    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: dict[str, Any] | None = None


class Generated(msgspec.Struct):
    request_id: str
    choices: list[TokensChoice]
    usage: Usage | UnsetType = UNSET
    prompt_logprobs: list[Any] | None = None


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /abort_requests."""

    request_ids: Annotated[list[Name], Meta(min_length=1, max_length=MAX_ENTRIES)]
    """Ids of answers (cmpl-...) or of requests (X-Request-Id), all by the same key."""


class TokensAnswer(ChoicesAnswer):
    def event(self, choice: int, delta: Delta, parts: Sequence[Delta] = ()) -> bytes:
        self.count(delta)
        return event(Generated(self.id, [TokensChoice(choice, delta.token_ids, delta.finish_reason, delta.stop_reason,
                                                      self._scored(delta.logprobs or []))]))

    def last_events(self) -> bytes:
        return event(Generated(self.id, [], self.usage())) if self.usage_at_end else b""

    def whole(self) -> Generated:
        lines = [TokensChoice(place, growth.token_ids, growth.finish_reason, growth.stop_reason, self._scored(growth.logprobs))
                 for place, growth in enumerate(self.growths)]
        scores = self.growths[0].prompt_logprobs
        return Generated(self.id, lines, self.usage(), prompt_entries(scores, self.namer) if scores is not None else None)

    def _scored(self, lines: list[TokenLogprobs]) -> dict[str, Any] | None:
        return {"content": chat_content(lines, self.namer)} if self.requests[0].params.logprobs is not None else None


class VLLM(OpenAIForm):
    def routes(self) -> Sequence[Route]:
        return (
            Route("POST", "/inference/v1/generate", self.generate, "Continue token ids by token ids", GenerateRequest,
                  answer=Generated, event=Generated),
            Route("POST", "/abort_requests", self.abort, "End requests by their ids", AbortRequest),
            Route("POST", "/collective_rpc", self.refused, "Refused: this server runs no methods that requests name"))

    async def generate(self, http: Request, body: GenerateRequest) -> Response:
        state = self.state
        name = state.admit(body.model)
        if body.sampling_params.get("stop") and body.sampling_params.get("detokenize") is False:
            raise RequestError("stop strings are only possible where detokenize is true", param="sampling_params")
        given = {name: value for name, value in body.sampling_params.items() if name not in UNREAD and value is not None}
        if own := sorted(given.keys() & {*GenerateRequest.__struct_fields__, "prompt", "echo", "suffix"}):
            raise UnsupportedError(f"sampling_params may not have {', '.join(own)}, which are no sampling parameters",
                                   "sampling_params")
        fields = {"max_tokens": None, **given, "prompt": body.token_ids, "stream": body.stream, "cache_salt": body.cache_salt,
                  "priority": body.priority, "stream_options": body.stream_options, "model": body.model}
        try:
            asked = msgspec.convert(msgspec.to_builtins(fields, str_keys=False), CompletionRequest)
        except msgspec.ValidationError as error:
            raise RequestError(f"sampling_params: {error}", param="sampling_params") from None
        check_stream(asked)
        # With 0 the token's own score stands in its list, too.
        few = 1 if asked.logprobs == 0 or asked.logprob_token_ids else None
        params = sampling_params(asked, state.llm.inputs.defaults, asked.max_tokens, asked.logprobs or few)
        requests = await prepare(state, http, [body.token_ids], params, asked, add_special_tokens=False)
        answer = TokensAnswer(body.request_id or http.scope["request_id"], name, requests, asked, namer(state, asked),
                              state.llm.info)
        if body.request_id is not None:
            http.scope["request_id"] = body.request_id
        return await respond(http, state.llm.open(requests), answer, bool(body.stream))

    async def abort(self, http: Request, body: AbortRequest) -> Response:
        """Ends this key's requests of these ids; unknown ones are ignored."""
        ended = [name for slot in self.state.fleet.loaded
                 for name in slot.llm.abort_named(body.request_ids, http.scope["api_key"])]
        return json_response({"aborted": ended})

    async def refused(self, http: Request) -> Response:
        raise RequestError(f"{http.url.path} is not possible: this server runs no methods that requests name",
                           code="not_implemented", status=501)
