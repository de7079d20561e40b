"""OpenAI's API as a dialect: its routes (with vLLM's /tokenize and /detokenize), bodies, and the shape of its errors."""

from collections.abc import Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from penstock.server.dialect import Route
from penstock.server.openai import chat, completions
from penstock.server.openai import protocol as p
from penstock.server.openai.chat import ChatCompletion, Chunk
from penstock.server.openai.completions import Completion
from penstock.server.openai.form import OpenAIForm
from penstock.server.openai.models import Model, ModelList, Models
from penstock.server.openai.tokens import Tokenized, Tokens
from penstock.server.state import State


class OpenAI(OpenAIForm):
    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._models, self._tokens = Models(state), Tokens(state)

    def routes(self) -> Sequence[Route]:
        tokens = self._tokens
        return (
            Route("POST", "/v1/chat/completions", partial(chat.answer, self.state), "Answer a conversation", p.ChatRequest,
                  True, (p.Message,), ChatCompletion, Chunk),
            Route("POST", "/v1/chat/completions/batch", self.chat_batch, "Answer several conversations", p.ChatBatchRequest,
                  True, (p.Message,), ChatCompletion, Chunk),
            Route("POST", "/v1/completions", partial(completions.answer, self.state), "Continue prompts",
                  p.CompletionRequest, True, answer=Completion, event=Completion),
            *(Route("POST", f"{prefix}/tokenize", tokens.tokenize, "Turn a text or a conversation into tokens",
                    p.TokenizeRequest, answer=Tokenized) for prefix in ("", "/v1")),
            *(Route("POST", f"{prefix}/detokenize", tokens.detokenize, "Turn tokens into text", p.DetokenizeRequest,
                    answer=dict[str, str]) for prefix in ("", "/v1")),
            Route("GET", "/tokenizer_info", tokens.info, "The tokenizer's configuration, special tokens and chat template"),
            Route("GET", "/v1/models", self._models.list, "List the served names", answer=ModelList),
            Route("GET", "/v1/models/{model:path}", self._models.one, "Describe one served name", answer=Model),
        )

    async def chat_batch(self, http: Request, body: p.ChatBatchRequest) -> Response:
        return await chat.answer(self.state, http, *body.conversations())
