"""What the routes share: the engine's frontend, the names it goes by, and whether work is taken."""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.requests import Request as HttpRequest

from penstock.config.schema import ServerOptions
from penstock.core.errors import RequestError
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.engine.async_llm import AsyncLLM
from penstock.engine.retention import Marked
from penstock.server.body import BodyReader
from penstock.server.errors import UnavailableError
from penstock.server.openai.protocol import GenerationFields
from penstock.server.openai.sampling import check_something_is_left, retained
from penstock.server.tenants import Tenants


class State:
    """One server's state. `draining` is set once and for good."""

    def __init__(self, llm: AsyncLLM, options: ServerOptions) -> None:
        self.llm = llm
        self.options = options
        self.names = options.served_model_name or [llm.options.model]
        self.created = int(time.time())
        self.bodies = BodyReader(options.max_body_bytes)
        self.tenants = Tenants(options, llm.options.cache_disk, llm.options.cache_disk_adopt)
        self.draining = False

    @property
    def name(self) -> str:
        """The first name, which answers carry."""
        return self.names[0]

    def not_ready(self) -> str | None:
        """Why no work is taken now, or None."""
        if self.draining:
            return "the server is shutting down"
        return self.llm.unhealthy()

    def admit(self, model: str | None) -> str:
        """The served name that a request means. RequestError 404 for another model, 503 while no work is taken."""
        if self.draining:
            raise UnavailableError("the server is shutting down", "shutting_down")
        if self.llm.dead is not None:
            raise UnavailableError(f"the engine has stopped: {self.llm.dead}", "engine_dead")
        if self.llm.info is None:
            raise UnavailableError("the model is still loading", "loading")
        if model is None:
            return self.name
        if model not in self.names:
            raise RequestError(f"the model {model!r} is not served here; possible: {', '.join(self.names)}", param="model",
                               code="model_not_found", status=404)
        return model

    async def prepare(self, http: HttpRequest, prompts: Sequence[str | list[int] | Marked], params: SamplingParams,
                      body: GenerationFields, *, add_special_tokens: bool) -> list[Request]:
        """Checked engine requests, each under a name of its own: two HTTP requests may carry the same request_id."""
        llm = self.llm
        tenant, salt = self.tenants.of(http.scope["api_key"], body.cache_salt)
        retain = retained(body)

        def work() -> list[Request]:
            return [llm.inputs.request(llm.new_id(), prompt, params, add_special_tokens=add_special_tokens,
                                       priority=body.priority or 0, salt=salt, tenant=tenant, retain=retain,
                                       keep_last=body.truncate_prompt_tokens) for prompt in prompts]

        size = sum(map(_effort, prompts))
        requests: list[Request] = await llm.off_loop(size, work)
        check_something_is_left(requests[0])
        return requests

    def text_of(self, prompt: str | list[int]) -> str:
        """A prompt as text, for echo. RequestError if it is ids and there is no tokenizer."""
        if isinstance(prompt, str):
            return prompt
        if self.llm.tokenizer is None:
            return ""
        return self.llm.tokenizer.decode(prompt)


def _effort(prompt: str | list[int] | Marked) -> int:
    """What it takes to prepare a prompt, in characters to tokenize. An id costs far less than a character, a request about as
    much as a hundred, and up to each mark the text is tokenized once more."""
    if isinstance(prompt, Marked):
        return 100 + len(prompt.text) + sum(mark.at for mark in prompt.marks)
    return 100 + (len(prompt) if isinstance(prompt, str) else len(prompt) // 10)
