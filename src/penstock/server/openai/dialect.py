"""OpenAI's API as a dialect: its routes (with vLLM's /tokenize and /detokenize), bodies, and the shape of its errors."""

from collections.abc import Container, Sequence

from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import RequestError
from penstock.server.dialect import Route
from penstock.server.openai import chat, completions
from penstock.server.openai.chat import ChatCompletion, Chunk
from penstock.server.openai.completions import Completion
from penstock.server.openai.form import OpenAIForm
from penstock.server.openai.models import Model, ModelList, Models
from penstock.server.openai.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, Message, TokenizeRequest
from penstock.server.openai.tokens import Detokenized, Tokenized, Tokens
from penstock.server.state import State


class OpenAI(OpenAIForm):
    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._models, self._tokens = Models(state), Tokens(state, self.bodies)

    def routes(self) -> Sequence[Route]:
        tokens = self._tokens
        return (
            Route("POST", "/v1/chat/completions", self.chat, "Answer a conversation", ChatRequest, True,
                  (Message,), ChatCompletion, Chunk),
            Route("POST", "/v1/completions", self.completions, "Continue prompts", CompletionRequest, True,
                  answer=Completion, event=Completion),
            Route("POST", "/invocations", self.invocations, "Answer a conversation or continue prompts, for SageMaker",
                  answer=ChatCompletion),
            *(Route("POST", f"{prefix}/tokenize", tokens.tokenize, "Turn a text or a conversation into tokens", TokenizeRequest,
                    answer=Tokenized) for prefix in ("", "/v1")),
            *(Route("POST", f"{prefix}/detokenize", tokens.detokenize, "Turn tokens into text", DetokenizeRequest,
                    answer=Detokenized) for prefix in ("", "/v1")),
            Route("GET", "/tokenizer_info", tokens.info, "The tokenizer's configuration, special tokens and chat template"),
            Route("GET", "/v1/models", self._models.list, "List the served names", answer=ModelList),
            Route("GET", "/v1/models/{model:path}", self._models.one, "Describe one served name", answer=Model),
        )

    async def chat(self, http: Request) -> Response:
        return await chat.answer(self.state, http, await self.bodies.read(http, ChatRequest))

    async def completions(self, http: Request) -> Response:
        return await completions.answer(self.state, http, await self.bodies.read(http, CompletionRequest))

    async def invocations(self, http: Request) -> Response:
        """Answers like the chat or the completions route, depending on the body's fields."""
        body = await self.bodies.read(http, kind_of)
        if isinstance(body, ChatRequest):
            return await chat.answer(self.state, http, body)
        return await completions.answer(self.state, http, body)


def kind_of(fields: Container[str]) -> type[ChatRequest] | type[CompletionRequest]:
    """The kind of request that has these fields. RequestError if there is none."""
    if "messages" in fields:
        return ChatRequest
    if "prompt" in fields:
        return CompletionRequest
    raise RequestError("Missing required parameter: 'messages' (a conversation) or 'prompt' (a text)", param="messages",
                       code="missing_required_parameter")
