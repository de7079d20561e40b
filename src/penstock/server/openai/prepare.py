"""From the prompts and parameters of a body to requests that the engine takes."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request as HttpRequest

from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.engine.retention import Marked
from penstock.server.openai.protocol import GenerationFields
from penstock.server.openai.sampling import check_something_is_left, retained
from penstock.server.state import State


async def prepare(state: State, http: HttpRequest, prompts: Sequence[str | list[int] | Marked], params: SamplingParams,
                  body: GenerationFields, *, add_special_tokens: bool) -> list[Request]:
    """Checked engine requests, each under a name of its own: two HTTP requests may carry the same request_id."""
    llm = state.llm
    tenant, salt = state.tenants.of(http.scope["api_key"], body.cache_salt)
    retain = retained(body)

    def work() -> list[Request]:
        return [llm.inputs.request(llm.new_id(), prompt, params, add_special_tokens=add_special_tokens,
                                   priority=body.priority or 0, salt=salt, tenant=tenant, retain=retain,
                                   keep_last=body.truncate_prompt_tokens) for prompt in prompts]

    size = sum(map(_effort, prompts))
    requests: list[Request] = await llm.off_loop(size, work)
    check_something_is_left(requests[0])
    for request in requests[1:]:
        request.follows = True
    return requests


def _effort(prompt: str | list[int] | Marked) -> int:
    """Cost of preparing a prompt, in characters to tokenize. An id costs far less than a character, a request about as much as
    a hundred, and up to each mark the text is tokenized once more."""
    if isinstance(prompt, Marked):
        return 100 + len(prompt.text) + sum(mark.at for mark in prompt.marks)
    return 100 + (len(prompt) if isinstance(prompt, str) else len(prompt) // 10)
