"""Turns the prompts and parameters of a body into engine requests.

Precedence of parameters: body, model's defaults, OpenAI's. An answer's constraint is in OpenAI's fields or vLLM's."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest

from penstock.core.errors import RequestError
from penstock.core.request import MARKED_PRIORITY, PROMPT, WHOLE, Request, Span
from penstock.core.sampling import SamplingParams, StructuredOutputsParams
from penstock.engine.retention import Marked, read_mark, seconds_of
from penstock.grammar.definition import define
from penstock.server.openai import protocol as p
from penstock.server.promise import promised
from penstock.server.state import State

SAME_NAME = ("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
             "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "logit_bias",
             "allowed_token_ids", "bad_words", "skip_special_tokens", "prompt_logprobs", "logprob_token_ids")
"""Fields with the same name and meaning in a body and in SamplingParams."""


def sampling_params(body: p.GenerationFields, defaults: Mapping[str, Any], max_tokens: int | None,
                    logprobs: int | None) -> SamplingParams:
    """The parameters of `body`; `max_tokens` None means up to the model's own limit."""
    beams = _beams(body)
    # A model's own defaults are about drawing tokens, which beam search does not do.
    said: dict[str, Any] = beams or {name: value for name, value in defaults.items() if name != "max_tokens"}
    said |= {name: value for name in SAME_NAME if (value := getattr(body, name)) is not None}
    if body.logprob_token_ids and logprobs is None:
        raise RequestError("logprobs must be asked for when using `logprob_token_ids`", param="logprob_token_ids")
    structure = structure_of(body)
    return SamplingParams(**said, max_tokens=max_tokens, logprobs=logprobs,
                          structured_outputs=None if structure is None else structure[0])


def _beams(body: p.GenerationFields) -> dict[str, Any]:
    """The beam search parameters; empty without beam search. RequestError for fields that need beam search."""
    if body.use_beam_search:
        said = {"beam_width": body.beam_width or body.n or 1, "length_penalty": body.length_penalty,
                "early_stopping": body.early_stopping}
        return {name: value for name, value in said.items() if value is not None}
    for name, neutral in (("beam_width", None), ("length_penalty", 1.0), ("early_stopping", False)):
        if getattr(body, name) not in (None, neutral):
            raise RequestError(f"{name} is only possible when use_beam_search is true", param=name)
    return {}


def retained(body: p.GenerationFields) -> list[Span]:
    """Spans to retain in the cache, apart from cache_control marks in messages."""
    spans = []
    if body.cache_control is not None:
        spans.append(Span(PROMPT, *read_mark(msgspec.to_builtins(body.cache_control), "cache_control")))
    if body.prompt_cache_retention == "24h":
        spans.append(Span(PROMPT, MARKED_PRIORITY, 86400.0))
    if (options := body.prompt_cache_options) is not None:
        spans.append(Span(PROMPT, MARKED_PRIORITY, seconds_of(options.ttl, "prompt_cache_options.ttl")))
    for span in body.cache_retention or ():
        upto = {"prompt": PROMPT, "all": WHOLE}[span.upto] if isinstance(span.upto, str) else span.upto
        spans.append(Span(upto, span.priority, seconds_of(span.ttl, "cache_retention.ttl")))
    return spans


def check_stream(body: p.GenerationFields) -> None:
    """RequestError for fields that contradict streaming."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is only possible when stream is true", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs is only possible when stream is false", param="prompt_logprobs")


def check_something_is_left(request: Request) -> None:
    """RequestError if bad_words or min_tokens forbid every token of allowed_token_ids, so that no token can be generated."""
    params = request.params
    if params.allowed_token_ids is None:
        return
    left = set(params.allowed_token_ids) - {word[0] for word in params.bad_words_token_ids or () if len(word) == 1}
    if params.min_tokens > 0:
        left -= {*request.eos_ids, *(params.stop_token_ids or ())}
    if not left:
        raise RequestError("allowed_token_ids has only tokens that bad_words, or min_tokens (no token may end the output "
                           "before that), forbid; add another", param="allowed_token_ids")


def structure_of(body: p.StructureFields) -> tuple[StructuredOutputsParams, str] | None:
    """The constraint in `body` and the field that has it, or None. RequestError if two fields do."""
    found = [(params, field) for params, field in _asked(body) if params is not None]
    if len(found) > 1:
        raise RequestError(f"{found[0][1]} and {found[1][1]} both constrain the answer; send one of them", param=found[1][1])
    return found[0] if found else None


def _asked(body: p.StructureFields) -> Iterator[tuple[StructuredOutputsParams | None, str]]:
    wanted = body.response_format
    if isinstance(wanted, p.JsonObjectFormat):
        yield StructuredOutputsParams(json_object=True), "response_format"
    elif isinstance(wanted, p.JsonSchemaFormat):
        yield StructuredOutputsParams(json=wanted.json_schema.schema), "response_format.json_schema.schema"
    elif isinstance(wanted, p.StructuralTagFormat):
        tag = {name: value for name, value in msgspec.to_builtins(wanted).items() if value is not None}
        yield StructuredOutputsParams(structural_tag=tag), "response_format"
    if body.structured_outputs is not None:
        yield body.structured_outputs, "structured_outputs"
    for kind in ("json", "regex", "choice", "grammar"):
        value = getattr(body, f"guided_{kind}")
        if value is not None:
            yield StructuredOutputsParams(**{kind: value}), f"guided_{kind}"


def check_structure(body: p.StructureFields) -> None:
    """RequestError, by the name of the body's own field, if the answer cannot look like that. Takes milliseconds."""
    if (asked := structure_of(body)) is not None:
        try:
            define(asked[0])
        except RequestError as error:
            if asked[1] != "structured_outputs":
                # The message begins with the offline API's name of the field.
                error.message = error.message.removeprefix(f"{error.param or ''}: ")
                error.param = asked[1]
                error.args = (error.message,)
            raise


_COMPILING = 100_000
"""Cost of checking a schema or grammar, in characters to tokenize: some milliseconds."""


async def prepare(state: State, http: HttpRequest, prompts: Sequence[str | list[int] | Marked], params: SamplingParams,
                  body: p.GenerationFields, *, add_special_tokens: bool, parsed: bool = False,
                  predicted: str = "") -> list[Request]:
    """Checked engine requests, each with a name of its own. RequestError naming the limit that they would pass."""
    llm, adapter, retain = state.llm, state.adapter(body.model), retained(body)
    for prompt in prompts:
        if not isinstance(prompt, list):
            text = prompt if isinstance(prompt, str) else prompt.text
            state.limits.check_text(len(text), llm.inputs.info.max_model_len)

    def make(whose: dict[str, Any]) -> list[Request]:
        check_structure(body)
        # Once for all prompts.
        spelled = llm.inputs.spelled(params)
        made = [llm.inputs.request(llm.new_id(), prompt, spelled, add_special_tokens=add_special_tokens, retain=retain,
                                   keep=body.truncate_prompt_tokens, side=body.truncation_side or "left", parsed=parsed,
                                   adapter=adapter, predicted=predicted, **whose) for prompt in prompts]
        check_something_is_left(made[0])
        return made

    state.limits.check_text(len(predicted), llm.inputs.info.max_model_len, "prediction")
    size = len(predicted) + sum(map(_effort, prompts)) + (1 + len(prompts) // 10) * _lists(params)
    if params.structured_outputs is not None:
        size += _COMPILING
    return await admitted(state, http, body, body.service_tier, len(prompts), params, make, size)


async def admitted(state: State, http: HttpRequest, body: p.ServiceFields, service_tier: str | None, count: int,
                   params: SamplingParams, make: Callable[[dict[str, Any]], list[Request]], size: int) -> list[Request]:
    """The requests that `make` makes beside the event loop, under the limits of the server and the client, with its promise.
    `make` gets the arguments that say whose they are; `size` is its cost in characters to tokenize."""
    llm, key = state.llm, http.scope["key"]
    state.limits.work(count, llm.inputs.counted(params))
    priority = state.priority(body.priority, http.scope["admin"], key)
    promise = promised(llm.inputs.info.classes, service_tier, http.headers, key, priority)
    # Hashing a salt of megabytes takes milliseconds.
    own = body.cache_salt or ""
    tenant, salt = await llm.work.run(len(own), lambda: state.tenants.of(http.scope["api_key"], own))
    requests = await llm.work.run(size, lambda: make({"priority": priority, "salt": salt, "tenant": tenant}))
    state.limits.check_tenant(llm.traffic.tenant_tokens[tenant], requests, key)
    promise.give(requests, http.scope["began"], llm.traffic.delivery.late)
    for request in requests[1:]:
        request.follows = requests[0].id
    return requests


def _effort(prompt: str | list[int] | Marked) -> int:
    """The cost of preparing a prompt, in characters to tokenize. A token id costs far less than a character, a request about as
    much as a hundred characters, and for each mark the text before it is tokenized once more."""
    if isinstance(prompt, Marked):
        return 100 + len(prompt.text) + sum(mark.at for mark in prompt.marks)
    return 100 + (len(prompt) if isinstance(prompt, str) else len(prompt) // 10)


def _lists(params: SamplingParams) -> int:
    """The cost of preparing the lists of the parameters, in characters. A bad word is tokenized in three spellings."""
    ids = (params.allowed_token_ids, params.stop_token_ids, params.logit_bias)
    return sum(len(found) for found in ids if found) + 3 * sum(100 + len(word) for word in params.bad_words or ())
