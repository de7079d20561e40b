"""OpenAI's API as a dialect: its routes, bodies, and the shape of its errors. Routes of models and tokens stand here, the
latter (/tokenize, /detokenize, /tokenizer_info) in vLLM's shapes."""

from collections.abc import Sequence
from functools import partial
from typing import TypedDict

from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import RequestError
from penstock.engine.work import checkpoint
from penstock.server.dialect import Route, json_response, utc
from penstock.server.openai import chat, completions, protocol as p
from penstock.server.openai.form import OpenAIForm
from penstock.server.openai.messages import render
from penstock.server.state import State, StateRoutes
from penstock.text import Tokenizer
from penstock.text.template import DEFAULT


class OpenAI(OpenAIForm):
    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._models, self._tokens = Models(state), Tokens(state)

    def routes(self) -> Sequence[Route]:
        tokens = self._tokens
        return (
            Route("POST", "/v1/chat/completions", partial(chat.answer, self.state), "Answer a conversation", p.ChatRequest,
                  (), (p.Message,), chat.ChatCompletion, chat.Chunk),
            Route("POST", "/v1/chat/completions/batch", self.chat_batch, "Answer several conversations", p.ChatBatchRequest,
                  (), (p.Message,), chat.ChatCompletion, chat.Chunk),
            Route("POST", "/v1/completions", partial(completions.answer, self.state), "Continue prompts",
                  p.CompletionRequest, answer=completions.Completion, event=completions.Completion),
            *(Route("POST", f"{prefix}/tokenize", tokens.tokenize, "Turn a text or a conversation into tokens",
                    p.TokenizeRequest, answer=Tokenized) for prefix in ("", "/v1")),
            *(Route("POST", f"{prefix}/detokenize", tokens.detokenize, "Turn tokens into text", p.DetokenizeRequest,
                    answer=dict[str, str]) for prefix in ("", "/v1")),
            Route("GET", "/tokenizer_info", tokens.info, "The tokenizer's configuration, special tokens and chat template"),
            Route("GET", "/v1/models", self._models.list, "List the served names", answer=ModelList),
            Route("GET", "/v1/models/{model:path}", self._models.one, "Describe one served name", answer=Model))

    async def chat_batch(self, http: Request, body: p.ChatBatchRequest) -> Response:
        return await chat.answer(self.state, http, *body.conversations())


class Tokenized(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class Tokens(StateRoutes):
    async def tokenize(self, http: Request, body: p.TokenizeRequest) -> Response:
        """{prompt} or {messages} -> {count, max_model_len, tokens, token_strs}."""
        state = self.state
        tokenizer = self._tokenizer(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either prompt or messages", param="prompt", code="missing_required_parameter")
        if body.prompt is not None:
            text, special = body.prompt, body.add_special_tokens is not False
        else:
            text = (await render(state, http, body)).text
            special = bool(body.add_special_tokens)
        info = state.llm.info
        longest = info.max_model_len if info else 0
        state.limits.check_text(len(text), longest)

        def work() -> Response:
            tokens = tokenizer.encode(text, special)
            checkpoint()
            names = [tokenizer.token_name(token) for token in tokens] if body.return_token_strs else None
            return json_response({"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": names})

        return await state.llm.work.run(len(text), work)

    async def detokenize(self, http: Request, body: p.DetokenizeRequest) -> Response:
        """{tokens} -> {prompt}."""
        state = self.state
        tokenizer = self._tokenizer(body.model)

        def work() -> Response:
            for token in body.tokens:
                if token >= tokenizer.vocab_size:
                    raise RequestError(f"tokens names token {token}; the vocabulary has ids 0 to {tokenizer.vocab_size - 1}",
                                       param="tokens")
            checkpoint()
            return json_response({"prompt": tokenizer.decode(body.tokens, body.skip_special_tokens)})

        return await state.llm.work.run(4 * len(body.tokens), work)

    async def info(self, http: Request) -> Response:
        """tokenizer_config.json with the special tokens by role and the chat template that are really used."""
        tokenizer, template = self._tokenizer(None), self.state.llm.template
        sources = template.sources if template is not None else {}
        shown = sources.get(DEFAULT) if len(sources) < 2 else [
            {"name": name, "template": source} for name, source in sources.items()]
        return json_response({"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.config, **tokenizer.special_tokens,
                              "vocab_size": tokenizer.vocab_size, "chat_template": shown})

    def _tokenizer(self, model: str | None) -> Tokenizer:
        self.state.admit(model)
        tokenizer = self.state.llm.tokenizer
        if tokenizer is None:
            raise RequestError("this server has no tokenizer (--skip-tokenizer-init)", code="no_tokenizer")
        return tokenizer


class Model(TypedDict):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    type: str
    """This and the next two are Anthropic's, whose clients ask the same route."""
    display_name: str
    created_at: str


class ModelList(TypedDict):
    object: str
    data: list[Model]
    first_id: str
    last_id: str
    has_more: bool


class Models(StateRoutes):
    """The two endpoints. They answer while the model still loads."""

    async def list(self, http: Request) -> Response:
        names = self.state.fleet.names
        return json_response({"object": "list", "data": [self._describe(name) for name in names], "first_id": names[0],
                              "last_id": names[-1], "has_more": False})

    async def one(self, http: Request) -> Response:
        return json_response(self._describe(http.path_params["model"]))

    def _describe(self, name: str) -> Model:
        slot = self.state.fleet.named(name)
        info, adapter = slot.llm.info, slot.llm.adapters.get(name)
        root = slot.llm.model if adapter is None else adapter.folder
        parent = slot.names[0] if slot.adapts(name) else None
        return {"id": name, "object": "model", "created": self.state.created, "owned_by": "penstock",
                "root": root, "parent": parent, "max_model_len": info.max_model_len if info else None,
                "type": "model", "display_name": name, "created_at": utc(self.state.created)}
