"""POST /tokenize and /detokenize and GET /tokenizer_info, in vLLM's shapes."""

from typing import TypedDict

from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import RequestError
from penstock.engine.work import checkpoint
from penstock.server.answer import json_response
from penstock.server.openai.messages import render
from penstock.server.openai.protocol import DetokenizeRequest, TokenizeRequest
from penstock.server.state import StateRoutes
from penstock.text import Tokenizer
from penstock.text.template import DEFAULT


class Tokenized(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class Tokens(StateRoutes):
    async def tokenize(self, http: Request, body: TokenizeRequest) -> Response:
        """{prompt} or {messages} -> {count, max_model_len, tokens, token_strs}."""
        state = self.state
        state.admit(body.model)
        tokenizer = self._tokenizer()
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

    async def detokenize(self, http: Request, body: DetokenizeRequest) -> Response:
        """{tokens} -> {prompt}."""
        state = self.state
        state.admit(body.model)
        tokenizer = self._tokenizer()

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
        self.state.admit(None)
        tokenizer, template = self._tokenizer(), self.state.llm.template
        sources = template.sources if template is not None else {}
        shown = sources.get(DEFAULT) if len(sources) < 2 else [
            {"name": name, "template": source} for name, source in sources.items()]
        return json_response({"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.config, **tokenizer.special_tokens,
                              "vocab_size": tokenizer.vocab_size, "chat_template": shown})

    def _tokenizer(self) -> Tokenizer:
        tokenizer = self.state.llm.tokenizer
        if tokenizer is None:
            raise RequestError("this server has no tokenizer (--skip-tokenizer-init)", code="no_tokenizer")
        return tokenizer
