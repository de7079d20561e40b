"""The service: its calls become requests to the application's own routes, with the same keys, limits, logs and traces.

An extra (pip install penstock[grpc]). Texts come as the tensor text_input; parameters are the fields of /v1/completions."""

import asyncio
import json
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from starlette.types import ASGIApp, Message

from penstock.core.errors import ConfigError, RequestError
from penstock.observe.log import LOG
from penstock.server.inside import inside
from penstock.server.kserve.messages import METHODS, SERVICE, message, request_of
from penstock.server.openai.completions import MAX_PROMPTS
from penstock.server.state import State

_HEADERS = ("authorization", "x-api-key", "x-request-id", "traceparent", "tracestate")
"""Metadata that are headers of the request."""

_CODES = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND",
          408: "DEADLINE_EXCEEDED", 413: "RESOURCE_EXHAUSTED", 422: "INVALID_ARGUMENT", 429: "RESOURCE_EXHAUSTED",
          501: "UNIMPLEMENTED", 503: "UNAVAILABLE"}
_WATCH_SECONDS = 0.5
_UNKNOWN = health_pb2.HealthCheckResponse(status="SERVICE_UNKNOWN")

MOST_CALLS = 1024  # that run at once; others are refused as RESOURCE_EXHAUSTED


class CallError(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, content: bytes) -> None:
        try:
            text = str(json.loads(content)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            text = content.decode(errors="replace")
        # It travels in a header.
        self.text = text[:500]
        self.code = grpc.StatusCode[_CODES.get(status, "INTERNAL")]
        super().__init__(self.text)


class Service:
    """KServe's GRPCInferenceService."""

    def __init__(self, app: ASGIApp, state: State) -> None:
        self._app = app
        self._state = state

    def handler(self) -> Any:
        made = {}
        for method, streams in METHODS.items():
            make = grpc.stream_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
            # Messages are parsed here, so that a broken one is refused as what it is.
            made[method] = make(getattr(self, method) if streams else self._checked(method), None,
                                message(f"{method}Response").SerializeToString)
        return grpc.method_handlers_generic_handler(SERVICE, made)

    def _checked(self, method: str) -> Callable[[bytes, Any], Any]:
        async def call(data: bytes, context: Any) -> Any:
            try:
                return await getattr(self, method)(await self._beside(len(data), partial(_parsed, method, data)), context)
            except CallError as error:
                await context.abort(error.code, error.text)

        return call

    async def ServerLive(self, _request: Any, _context: Any) -> Any:  # noqa: N802 (the protocol's names)
        return message("ServerLiveResponse")(live=True)

    async def ServerReady(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        return message("ServerReadyResponse")(ready=self._state.not_ready() is None)

    async def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        _one_version(request.version)
        slot = self._state.fleet.find(request.name)
        if slot is None:
            raise CallError(404, f"the model {request.name!r} is not served here".encode())
        return message("ModelReadyResponse")(ready=slot.llm.unhealthy() is None and not self._state.draining)

    async def ServerMetadata(self, _request: Any, context: Any) -> Any:  # noqa: N802
        found = await self._json("GET", "/version", None, context)
        return message("ServerMetadataResponse")(name="penstock", version=found["version"])

    async def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        _one_version(request.version)
        await self._json("GET", f"/v1/models/{request.name}", None, context)
        tensor = message("ModelMetadataResponse.TensorMetadata")
        outputs = [("embedding", "FP32", [-1, -1])] if self._embeds(request.name) else [
            ("text_output", "BYTES", [-1]), ("finish_reason", "BYTES", [-1])]
        return message("ModelMetadataResponse")(
            name=request.name, platform="penstock", inputs=[tensor(name="text_input", datatype="BYTES", shape=[-1])],
            outputs=[tensor(name=name, datatype=kind, shape=shape) for name, kind, shape in outputs])

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        texts, fields = await self._beside(request.ByteSize(), partial(_read, request))
        if self._embeds(request.model_name):
            found = await self._json("POST", "/v1/embeddings", {**fields, "input": texts}, context)
            vectors = [line["embedding"] for line in found["data"]]
            numbers = [number for vector in vectors for number in vector]
            return _answer(request, found, ("embedding", "FP32", [len(vectors), len(vectors[0])], numbers))
        found = await self._json("POST", "/v1/completions", {**fields, "prompt": texts}, context)
        return _answer(request, found, *_choices(found["choices"]))

    async def ModelStreamInfer(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """One request after another; an error is an answer, and the stream goes on."""
        kind = message("ModelStreamInferResponse")
        async for data in requests:
            try:
                request = await self._beside(len(data), partial(_parsed, "ModelStreamInfer", data))
                texts, fields = await self._beside(len(data), partial(_read, request))
                body = {**fields, "prompt": texts, "stream": True}
                async with aclosing(self._events("/v1/completions", body, context)) as events:
                    async for event in events:
                        if event.get("choices"):
                            yield kind(infer_response=_answer(request, event, *_choices(event["choices"])))
            except CallError as error:
                yield kind(error_message=error.text)

    def _embeds(self, name: str) -> bool:
        slot = self._state.fleet.find(name)
        return slot is not None and slot.llm.info is not None and slot.llm.info.task == "embed"

    # -- the application

    async def _beside(self, size: int, read: Callable[[], Any]) -> Any:
        """Returns the result of `read` for a message of so many bytes, made beside the event loop if that takes long."""
        try:
            return await self._state.llm.work.run(size, read)
        except RequestError as error:
            raise CallError(error.status, str(error).encode()) from None

    async def _json(self, method: str, path: str, body: Any, context: Any) -> Any:
        async with aclosing(self._call(method, path, body, context)) as chunks:
            return json.loads(b"".join([chunk async for chunk in chunks]))

    async def _events(self, path: str, body: Any, context: Any) -> AsyncGenerator[dict[str, Any], None]:
        rest = b""
        async with aclosing(self._call("POST", path, body, context)) as chunks:
            async for chunk in chunks:
                *events, rest = (rest + chunk).split(b"\n\n")
                for event in events:
                    data = event.removeprefix(b"data: ")
                    if event.startswith(b"data: {"):
                        found = json.loads(data)
                        if "error" in found:
                            raise CallError(500, data)
                        yield found

    async def _call(self, method: str, path: str, body: Any, context: Any) -> AsyncGenerator[bytes, None]:
        """The pieces of the application's answer. CallError if it is none of success."""
        content = b"" if body is None else json.dumps(body, ensure_ascii=False).encode()
        pieces: asyncio.Queue[Message | None] = asyncio.Queue(64)
        gone = asyncio.Event()
        scope, receive = inside(method, path, content, _headers(context), gone, http_version="2", client=_client(context),
                                server=None)

        async def run() -> None:
            try:
                await self._app(scope, receive, pieces.put)
            finally:
                await pieces.put(None)

        task, status, failed = asyncio.create_task(run()), 500, b""
        try:
            while (piece := await pieces.get()) is not None:
                if piece["type"] == "http.response.start":
                    status = piece["status"]
                elif status == 200:
                    yield bytes(piece.get("body", b""))
                else:
                    failed += bytes(piece.get("body", b""))
            if status != 200:
                raise CallError(status, failed or b"the request failed unexpectedly")
        finally:
            gone.set()
            task.cancel()


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """gRPC's health checks: of the server as a whole (""), and of the service."""

    def __init__(self, state: State) -> None:
        self._state = state

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        if (now := self._now(request.service)) == _UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service!r}")
        return now

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        last = None
        while True:
            if (now := self._now(request.service)) != last:
                yield (last := now)
            await asyncio.sleep(_WATCH_SECONDS)

    def _now(self, service: str) -> Any:
        if service not in ("", SERVICE):
            return _UNKNOWN
        return health_pb2.HealthCheckResponse(status="SERVING" if self._state.not_ready() is None else "NOT_SERVING")


async def serve(app: ASGIApp, state: State) -> Any:
    """A server that listens. ConfigError if it cannot."""
    options = state.options
    # A message is parsed on the event loop, in one piece: 4 MiB, gRPC's own default, take some hundredths of a second.
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", min(options.max_body_bytes, 4 << 20)),
                                      ("grpc.so_reuseport", int(options.reuse_port))], maximum_concurrent_rpcs=MOST_CALLS)
    server.add_generic_rpc_handlers((Service(app, state).handler(),))
    health_pb2_grpc.add_HealthServicer_to_server(Health(state), server)
    reflection.enable_server_reflection((SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
                                         reflection.SERVICE_NAME), server)
    address = f"[{options.host}]:{options.grpc_port}" if ":" in options.host else f"{options.host}:{options.grpc_port}"
    try:
        if options.ssl_certfile:
            authorities = Path(options.ssl_ca_certs).read_bytes() if options.ssl_ca_certs else None
            key, certificate = (Path(path).read_bytes() for path in (options.ssl_keyfile or options.ssl_certfile,
                                                                     options.ssl_certfile))
            credentials = grpc.ssl_server_credentials([(key, certificate)], authorities, options.ssl_cert_reqs == 2)
            port = server.add_secure_port(address, credentials)
        else:
            port = server.add_insecure_port(address)
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"cannot listen for gRPC on {address}: {error}; choose another --grpc-port") from None
    await server.start()
    LOG.info("gRPC at %s:%d", options.host, port)
    return server


def _headers(context: Any) -> list[tuple[bytes, bytes]]:
    given = {name: value for name, value in context.invocation_metadata() or () if name in _HEADERS and isinstance(value, str)}
    headers = {"content-type": "application/json", "host": "grpc", **given}
    return [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]


def _client(context: Any) -> tuple[str, int] | None:
    kind, _, rest = context.peer().partition(":")
    address, _, port = rest.rpartition(":")
    return (address, int(port)) if kind in ("ipv4", "ipv6") and port.isdigit() else None


def _one_version(version: str) -> None:
    if version:
        raise CallError(400, f"there is no version {version!r}; versions of a model are names, as NAME@1".encode())


def _parsed(method: str, data: bytes) -> Any:
    """A method's request. CallError for bytes that are none."""
    try:
        return message(request_of(method)).FromString(data)
    except DecodeError:
        raise CallError(400, f"this is no {request_of(method)}".encode()) from None


def _read(request: Any) -> tuple[list[str], dict[str, Any]]:
    """(the texts, the fields of the request to the route)."""
    _one_version(request.model_version)
    named = {tensor.name: place for place, tensor in enumerate(request.inputs)}
    if list(named) != ["text_input"] or request.inputs[0].datatype != "BYTES":
        raise CallError(400, f"inputs are {', '.join(named) or 'missing'}; possible is text_input, of type BYTES".encode())
    raw = request.raw_input_contents
    try:
        found = _unpacked(raw[0]) if raw else request.inputs[0].contents.bytes_contents
        texts = [text.decode() for text in islice(found, MAX_PROMPTS + 1)]
    except (UnicodeDecodeError, struct.error):
        raise CallError(400, b"text_input is not UTF-8, or its lengths do not fit") from None
    if len(texts) > MAX_PROMPTS:
        raise CallError(400, f"text_input has more than {MAX_PROMPTS} texts".encode())
    fields = {name: getattr(value, value.WhichOneof("parameter_choice") or "bool_param")
              for name, value in request.parameters.items()}
    if wrong := sorted(fields.keys() & {"prompt", "input", "model", "stream", "encoding_format"}):
        raise CallError(400, f"{wrong[0]} is no parameter: texts are text_input, the model is model_name, and ModelStreamInfer "
                             "streams".encode())
    return texts, {**fields, **({"model": request.model_name} if request.model_name else {})}


def _unpacked(raw: bytes) -> Iterable[bytes]:
    """Texts with their lengths before them, 4 bytes each."""
    at = 0
    while at < len(raw):
        (length,) = struct.unpack_from("<I", raw, at)
        if at + 4 + length > len(raw):
            raise struct.error
        yield raw[at + 4:at + 4 + length]
        at += 4 + length


def _choices(choices: list[dict[str, Any]]) -> list[tuple[str, str, list[int], list[Any]]]:
    return [(name, "BYTES", [len(choices)], [(one.get(field) or "").encode() for one in choices])
            for name, field in (("text_output", "text"), ("finish_reason", "finish_reason"))]


def _answer(request: Any, found: dict[str, Any], *tensors: tuple[str, str, list[int], list[Any]]) -> Any:
    """The message of an answer's tensors, in the form in which the request's came."""
    answer = message("ModelInferResponse")(model_name=found["model"], id=request.id)
    for name, value in (found.get("usage") or {}).items():
        if isinstance(value, int):
            answer.parameters[name].int64_param = value
    for name, kind, shape, values in tensors:
        tensor = answer.outputs.add(name=name, datatype=kind, shape=shape)
        if request.raw_input_contents:
            answer.raw_output_contents.append(struct.pack(f"<{len(values)}f", *values) if kind == "FP32" else
                                              b"".join(struct.pack("<I", len(text)) + text for text in values))
        else:
            getattr(tensor.contents, "fp32_contents" if kind == "FP32" else "bytes_contents").extend(values)
    return answer
