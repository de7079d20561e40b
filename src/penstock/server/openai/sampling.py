"""Request body -> SamplingParams. Precedence: the body, the model's defaults, OpenAI's defaults."""

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.core.errors import RequestError
from penstock.core.request import MARKED_PRIORITY, PROMPT, WHOLE, Request, Span
from penstock.core.sampling import SamplingParams
from penstock.engine.retention import read_mark, seconds_of
from penstock.server.openai.protocol import GenerationFields
from penstock.server.openai.structured import structure_of

SAME_NAME = ("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
             "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "logit_bias",
             "allowed_token_ids", "bad_words", "skip_special_tokens", "prompt_logprobs", "logprob_token_ids")
"""Fields with the same name and meaning in a body and in SamplingParams."""


def sampling_params(body: GenerationFields, defaults: Mapping[str, Any], max_tokens: int | None,
                    logprobs: int | None) -> SamplingParams:
    """The parameters of `body`; `max_tokens` None means up to the model's own limit."""
    beams = _beams(body)
    # A model's own defaults are about drawing tokens, which beam search does not do.
    said: dict[str, Any] = beams or {name: value for name, value in defaults.items() if name != "max_tokens"}
    for name in SAME_NAME:
        value = getattr(body, name)
        if value is not None:
            said[name] = value
    if body.logprob_token_ids and logprobs is None:
        raise RequestError("logprobs must be asked for when using `logprob_token_ids`", param="logprob_token_ids")
    structure = structure_of(body)
    return SamplingParams(**said, max_tokens=max_tokens, logprobs=logprobs,
                          structured_outputs=None if structure is None else structure[0])


def _beams(body: GenerationFields) -> dict[str, Any]:
    """The beam search parameters; empty without beam search. RequestError for fields that need beam search."""
    if body.use_beam_search:
        said = {"beam_width": body.beam_width or body.n or 1, "length_penalty": body.length_penalty,
                "early_stopping": body.early_stopping}
        return {name: value for name, value in said.items() if value is not None}
    for name, neutral in (("beam_width", None), ("length_penalty", 1.0), ("early_stopping", False)):
        if getattr(body, name) not in (None, neutral):
            raise RequestError(f"{name} is only possible when use_beam_search is true", param=name)
    return {}


def retained(body: GenerationFields) -> list[Span]:
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


def check_stream(body: GenerationFields) -> None:
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
