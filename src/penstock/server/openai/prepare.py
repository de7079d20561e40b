"""Turns the prompts and parameters of a body into engine requests."""

from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest

from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.engine.retention import Marked
from penstock.server.openai.protocol import GenerationFields, ServiceFields
from penstock.server.openai.sampling import check_something_is_left, retained
from penstock.server.openai.structured import check_structure
from penstock.server.promise import promised
from penstock.server.state import State

_COMPILING = 100_000
"""Cost of checking a schema or grammar, in characters to tokenize: some milliseconds."""


async def prepare(state: State, http: HttpRequest, prompts: Sequence[str | list[int] | Marked], params: SamplingParams,
                  body: GenerationFields, *, add_special_tokens: bool, parsed: bool = False,
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
                                   adapter=adapter, predicted=predicted, **whose)
                for prompt in prompts]
        check_something_is_left(made[0])
        return made

    state.limits.check_text(len(predicted), llm.inputs.info.max_model_len, "prediction")
    size = len(predicted) + sum(map(_effort, prompts)) + (1 + len(prompts) // 10) * _lists(params)
    if params.structured_outputs is not None:
        size += _COMPILING
    return await admitted(state, http, body, body.service_tier, len(prompts), params, make, size)


async def admitted(state: State, http: HttpRequest, body: ServiceFields, service_tier: str | None, count: int,
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
