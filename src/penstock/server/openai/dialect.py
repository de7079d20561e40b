"""OpenAI's API as a dialect: its routes (with vLLM's /tokenize and /detokenize), bodies, and the shape of its errors."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.server.dialect import Route
from penstock.server.openai.chat import Chat, ChatCompletion, Chunk
from penstock.server.openai.completions import Completion, Completions
from penstock.server.openai.form import OpenAIForm
from penstock.server.openai.invocations import Invocations
from penstock.server.openai.models import Model, ModelList, Models
from penstock.server.openai.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, Message, TokenizeRequest
from penstock.server.openai.tokens import Detokenized, Tokenized, Tokens
from penstock.server.state import State


class OpenAI(OpenAIForm):
    """The dialect over one server's state."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._chat, self._completions = Chat(state, self.bodies), Completions(state, self.bodies)
        self._invocations = Invocations(self._chat, self._completions, self.bodies)
        self._models, self._tokens = Models(state), Tokens(state, self.bodies)

    def routes(self) -> Sequence[Route]:
        tokens = self._tokens
        return (
            Route("POST", "/v1/chat/completions", self._chat.post, "Answer a conversation", ChatRequest, True,
                  (Message,), ChatCompletion, Chunk),
            Route("POST", "/v1/completions", self._completions.post, "Continue prompts", CompletionRequest, True,
                  answer=Completion, event=Completion),
            Route("POST", "/invocations", self._invocations.post, "Answer a conversation or continue prompts, for SageMaker",
                  answer=ChatCompletion),
            *(Route("POST", f"{prefix}/tokenize", tokens.tokenize, "Turn a text or a conversation into tokens", TokenizeRequest,
                    answer=Tokenized) for prefix in ("", "/v1")),
            *(Route("POST", f"{prefix}/detokenize", tokens.detokenize, "Turn tokens into text", DetokenizeRequest,
                    answer=Detokenized) for prefix in ("", "/v1")),
            Route("GET", "/tokenizer_info", tokens.info, "The tokenizer's configuration, special tokens and chat template"),
            Route("GET", "/v1/models", self._models.list, "List the served names", answer=ModelList),
            Route("GET", "/v1/models/{model:path}", self._models.one, "Describe one served name", answer=Model),
        )
