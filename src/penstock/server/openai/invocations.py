"""POST /invocations, SageMaker's one route: a chat request or a completion request, told apart by their fields."""

from __future__ import annotations

from collections.abc import Container

from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import RequestError
from penstock.server.body import BodyReader
from penstock.server.openai.chat import Chat
from penstock.server.openai.completions import Completions
from penstock.server.openai.protocol import ChatRequest, CompletionRequest


class Invocations:
    """The endpoint."""

    def __init__(self, chat: Chat, completions: Completions, bodies: BodyReader) -> None:
        self.chat = chat
        self.completions = completions
        self.bodies = bodies

    async def post(self, http: Request) -> Response:
        """Answers like the chat or the completions route, depending on the body's fields."""
        body = await self.bodies.read(http, kind_of)
        if isinstance(body, ChatRequest):
            return await self.chat.answer(http, body)
        return await self.completions.answer(http, body)


def kind_of(fields: Container[str]) -> type[ChatRequest] | type[CompletionRequest]:
    """The kind of request that has these fields. RequestError if there is none."""
    if "messages" in fields:
        return ChatRequest
    if "prompt" in fields:
        return CompletionRequest
    raise RequestError("Missing required parameter: 'messages' (a conversation) or 'prompt' (a text)", param="messages",
                       code="missing_required_parameter")
