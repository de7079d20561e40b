"""Turns the prompts and parameters of a body into engine requests."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request as HttpRequest

from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.engine.retention import Marked
from penstock.server.openai.protocol import GenerationFields
from penstock.server.openai.sampling import check_something_is_left, retained
from penstock.server.openai.structured import check_structure
from penstock.server.promise import promised
from penstock.server.state import State

_COMPILING = 100_000
"""Cost of checking a schema or grammar, in characters to tokenize: some milliseconds."""


async def prepare(state: State, http: HttpRequest, prompts: Sequence[str | list[int] | Marked], params: SamplingParams,
                  body: GenerationFields, *, add_special_tokens: bool, parsed: bool = False) -> list[Request]:
    """Checked engine requests, each under a name of its own: two HTTP requests may carry the same request_id. RequestError
    naming the limit that they would pass."""
    llm = state.llm
    state.limits.work(len(prompts), params)
    for prompt in prompts:
        if not isinstance(prompt, list):
            text = prompt if isinstance(prompt, str) else prompt.text
            state.limits.check_text(len(text), llm.inputs.info.max_model_len)
    priority = state.priority(body.priority, http.scope["admin"], http.scope["key"])
    promise = promised(llm.inputs.info.classes, body.service_tier, http.headers, http.scope["key"], priority)
    tenant, salt = state.tenants.of(http.scope["api_key"], body.cache_salt)
    retain = retained(body)

    adapter = state.adapter(body.model)

    def work() -> list[Request]:
        check_structure(body)
        # Once for all prompts.
        spelled = llm.inputs.spelled(params)
        made = [llm.inputs.request(llm.new_id(), prompt, spelled, add_special_tokens=add_special_tokens,
                                   priority=priority, salt=salt, tenant=tenant, retain=retain,
                                   keep_last=body.truncate_prompt_tokens, parsed=parsed, adapter=adapter) for prompt in prompts]
        check_something_is_left(made[0])
        return made

    size = sum(map(_effort, prompts)) + (1 + len(prompts) // 10) * _lists(params)
    if params.structured_outputs is not None:
        size += _COMPILING
    requests = await llm.work.run(size, work)
    state.limits.check_tenant(llm.tokens_in_flight(tenant), requests, http.scope["key"])
    promise.give(requests)
    for request in requests[1:]:
        request.follows = True
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
