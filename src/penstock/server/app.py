"""The web application: maps routes to their handlers, and wraps them in middleware."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from penstock.config.schema import ServerOptions
from penstock.core.errors import EngineDeadError, RequestError
from penstock.engine.async_llm import AsyncLLM
from penstock.observe.log import LOG
from penstock.server.access import AccessLog, Paths, Traces, tracer_of
from penstock.server.admin import Admin
from penstock.server.anthropic.dialect import Anthropic
from penstock.server.batches.run import Batches, Runner
from penstock.server.body import BodyReader
from penstock.server.dialect import Dialect, ErrorShapes, Handler, Route as Described, on_error
from penstock.server.docs import docs_page
from penstock.server.fleet import Fleet, Selecting
from penstock.server.gate import OPEN_ROUTES, Gate
from penstock.server.keys import KeyFile
from penstock.server.models import AdapterRoutes, ModelRoutes
from penstock.server.ollama.dialect import Ollama
from penstock.server.openai.dialect import OpenAI
from penstock.server.page import page_routes
from penstock.server.pooling.dialect import Pooling
from penstock.server.responses.dialect import Responses
from penstock.server.room import Room
from penstock.server.schema import openapi
from penstock.server.state import State
from penstock.server.vllm.dialect import VLLM


class Application:
    """One server's app over one AsyncLLM, which need not be started yet, or several. `asgi` is what a server runs."""

    def __init__(self, models: AsyncLLM | Fleet, options: ServerOptions) -> None:
        self.state = State(models, options)
        app = Starlette(exception_handlers=dict.fromkeys(
            (HTTPException, ClientDisconnect, RequestError, EngineDeadError, Exception), on_error))
        app.router.redirect_slashes = False
        selecting = Selecting(app, self.state.fleet)
        self.batches = Runner(self.state, selecting, lambda: self.shapes)
        # The first dialect shapes the errors of unknown paths.
        dialects: list[Dialect] = [
            OpenAI(self.state), Pooling(self.state), Anthropic(self.state, self.batches), Responses(self.state),
            Ollama(self.state), Batches(self.state, self.batches), VLLM(self.state)]
        handlers = [(route, dialect.bodies) for dialect in dialects for route in dialect.routes()]
        plain = BodyReader(self.state, lambda _where, text: text)
        handlers += [(route, plain) for part in (Admin(self.state), AdapterRoutes(self.state), Room(self.state), ModelRoutes(
            self.state, options.shutdown_timeout)) for route in part.routes()]
        routes = [route for route, _ in handlers]
        self.shapes = ErrorShapes(dialects)
        keys_file = KeyFile(options.keys_file) if options.keys_file else None
        keyed = options.api_key or options.admin_api_key or keys_file is not None
        open_routes = None if keyed else frozenset(route.path for route in routes)
        self.document = openapi(routes, OPEN_ROUTES if open_routes is None else open_routes, self.shapes, options.root_path)
        page = docs_page(self.document)
        app.router.routes += [
            *(Route(route.path, _handler(route, bodies), methods=[route.method]) for route, bodies in handlers),
            Route("/openapi.json", lambda request: JSONResponse(self.document)), *page_routes(),
            Route("/docs", lambda request: HTMLResponse(page))]
        asgi: ASGIApp = Gate(selecting, options.api_key, options.admin_api_key, options.allowed_origins, self.shapes,
                              lambda error: LOG.error("a request failed unexpectedly", exc_info=error), keys_file)
        if options.allowed_origins:
            # CORS wraps the gate, because a browser hides refusals without CORS headers from the page.
            asgi = CORSMiddleware(asgi, allow_origins=options.allowed_origins, allow_methods=["*"], allow_headers=["*"],
                                  expose_headers=["X-Request-Id", "X-Penstock-Ignored", "Retry-After"])
        if options.otlp_traces_endpoint:
            asgi = Traces(asgi, tracer_of(options.otlp_traces_endpoint))
        if options.log_requests:
            asgi = AccessLog(asgi)
        self.asgi: ASGIApp = Paths(asgi, options.root_path)


def _handler(route: Described, bodies: BodyReader) -> Handler:
    """The handler of a route for Starlette: the body is read here where it is of one type."""
    kind = route.body
    if not isinstance(kind, type) or route.form:
        return route.handler

    async def read(http: Request) -> Response:
        return await route.handler(http, await bodies.read(http, kind))

    return read
