"""The web application: which route is served by whom, and what surrounds every route."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

import penstock
from penstock.config.schema import ServerOptions
from penstock.core.errors import EngineDeadError, RequestError
from penstock.engine.async_llm import AsyncLLM
from penstock.observe.log import LOG
from penstock.server.admin import Admin
from penstock.server.errors import on_client_gone, on_http_exception, on_request_error
from penstock.server.gate import Gate
from penstock.server.openai.chat import Chat
from penstock.server.openai.completions import Completions
from penstock.server.openai.models import Models
from penstock.server.schema import openapi
from penstock.server.state import State
from penstock.server.tokens import Tokens


class Application:
    """One server's app over one AsyncLLM, which need not be started yet. `asgi` is what a server runs."""

    def __init__(self, llm: AsyncLLM, options: ServerOptions) -> None:
        self.state = State(llm, options)
        self.app = FastAPI(title="Penstock", version=penstock.__version__, openapi_url="/openapi.json", docs_url="/docs",
                           redoc_url=None, swagger_ui_oauth2_redirect_url=None, redirect_slashes=False)
        self._add_routes(self.app)
        self.app.add_exception_handler(HTTPException, on_http_exception)
        self.app.add_exception_handler(ClientDisconnect, on_client_gone)
        self.app.add_exception_handler(RequestError, on_request_error)
        self.app.add_exception_handler(EngineDeadError, on_request_error)
        self.app.add_exception_handler(Exception, on_request_error)
        document: dict[str, Any] = openapi()
        self.app.openapi = lambda: document  # type: ignore[method-assign]
        inner: ASGIApp = self.app
        if options.allowed_origins:
            inner = CORSMiddleware(inner, allow_origins=options.allowed_origins, allow_methods=["*"], allow_headers=["*"])
        self.asgi: ASGIApp = Gate(inner, options.api_key, options.admin_api_key, _report)

    def _add_routes(self, app: FastAPI) -> None:
        # Plain routes: the bodies are decoded by msgspec, so FastAPI's own machinery has nothing to do.
        chat, completions, models, tokens = Chat(self.state), Completions(self.state), Models(self.state), Tokens(self.state)
        admin = Admin(self.state)
        for path, handler in (("/v1/chat/completions", chat.post), ("/v1/completions", completions.post),
                              ("/tokenize", tokens.tokenize), ("/detokenize", tokens.detokenize),
                              ("/reset_prefix_cache", admin.reset_prefix_cache)):
            app.add_route(path, handler, methods=["POST"])
        for path, answer in (("/v1/models", models.list), ("/v1/models/{model:path}", models.one), ("/health", admin.health),
                              ("/ready", admin.ready), ("/metrics", admin.metrics), ("/version", admin.version),
                              ("/load", admin.load), ("/server_info", admin.server_info),
                              ("/kv_event_sources", admin.kv_event_sources)):
            app.add_route(path, answer, methods=["GET"])
        app.add_route("/ping", admin.health, methods=["GET", "POST"])


def _report(error: BaseException) -> None:
    LOG.error("a request failed for a reason nobody foresaw", exc_info=error)
