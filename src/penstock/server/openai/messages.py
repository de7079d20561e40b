"""Renders the messages of a chat request to the prompt's text."""

from typing import Any

from starlette.requests import Request

from penstock.core.errors import RequestError, UnsupportedError
from penstock.engine.rendering import Conversation
from penstock.engine.retention import Marked
from penstock.server.openai.protocol import ChatRequest, TokenizeRequest
from penstock.server.openai.reading import offered
from penstock.server.state import State
from penstock.text import ChatTemplate
from penstock.text.template import check_variables

Templated = ChatRequest | TokenizeRequest
"""Bodies with messages and template fields."""

STYLE = ("reasoning_effort", "verbosity")
"""Fields whose meaning is defined by the model's template."""


async def render(state: State, http: Request, body: Templated) -> Marked:
    """Renders the conversation, with its cache_control marks. RequestError if there is no template, or it refuses."""
    template = choose(state.llm.template, body.chat_template, state.options.trust_request_chat_template)
    # Tools that tool_choice rules out are not shown to the model.
    tools = offered(body) or None
    opening = body.add_generation_prompt if body.add_generation_prompt is not None else not body.continue_final_message
    how = {"add_generation_prompt": opening, "documents": body.documents,
           "continue_final_message": bool(body.continue_final_message), **_variables(template, body)}
    return await state.llm.render(Conversation(body.messages or [], tools, body.chat_template, how), http.scope["body_bytes"])


async def count_tokens(state: State, http: Request, body: ChatRequest, param: str = "prompt") -> int:
    """The number of tokens of a conversation's prompt. RequestError, naming `param`, for one that is too long."""
    text = (await render(state, http, body)).text
    tokenizer = state.llm.inputs.tokenizer
    assert tokenizer is not None, "there was a template"
    state.limits.check_text(len(text), state.llm.inputs.info.max_model_len, param)
    return await state.llm.work.run(len(text), lambda: len(tokenizer.encode(text, False)))


def choose(template: ChatTemplate | None, wanted: str | None, trust: bool) -> ChatTemplate:
    """The template to use: the server's, one of the model's by name, or, if that is allowed, the request's own text."""
    if template is None:
        raise RequestError("this server runs on token ids only (--skip-tokenizer-init); send ids to /v1/completions",
                           param="messages", code="no_tokenizer")
    if wanted is None:
        return template
    if wanted not in template.sources and not trust:
        raise UnsupportedError("chat_template cannot be taken from a request: a template is a program, and this server does "
                               "not run those of its clients (--trust-request-chat-template). Possible by name: "
                               f"{', '.join(template.sources) or 'none'}", "chat_template")
    return template.using(wanted)


def _variables(template: ChatTemplate, body: Templated) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    check_variables(variables)
    if body.reasoning_effort == "none":
        variables.setdefault("enable_thinking", False)
    # Fields that the template does not read are left out; `ignored` reports them.
    return {**{name: getattr(body, name) for name in STYLE if getattr(body, name) is not None and template.reads(name)},
            **variables}


def ignored(template: ChatTemplate, body: Templated) -> list[str]:
    """Fields of `body` meant for the template that the template does not read."""
    off = body.reasoning_effort == "none" and template.reads("enable_thinking")
    return [name for name in STYLE if getattr(body, name) is not None and not template.reads(name)
            and not (off and name == "reasoning_effort")]
