"""The first layer of every request: its id, and checks of its key, its origin and its content type. Pure ASGI.

Bodies are limited where they are read, in `body`."""

import hmac
import ipaddress
import re
import time
import uuid
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.core.errors import RequestError
from penstock.engine.stream import Stream
from penstock.server.dialect import ErrorShapes, as_request_error, error_response, ignored_header
from penstock.server.keys import KeyFile
from penstock.server.page import is_page

OPEN_ROUTES = frozenset({"/health", "/ready", "/ping"})
"""Routes that never need a key, as the page's own files. Where there are keys all other paths need one, known or not."""

PROBES = OPEN_ROUTES | {"/metrics", "/load"}
"""Routes that machines ask again and again."""

ADMIN_ROUTES = frozenset({"/reset_prefix_cache", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/engine",
                          "/engine/events", "/models/load", "/models/unload", "/sleep", "/wake_up",
                          "/update_weights_from_disk", "/start_profile", "/stop_profile"})
"""Routes that affect or show every tenant: they need an admin key if there are several keys."""

BODILESS_ROUTES = frozenset({"/sleep", "/wake_up", "/start_profile", "/stop_profile"})
"""POST routes without a body, which need no type; those that end in /cancel are others."""

UPLOAD_ROUTES = frozenset({"/v1/files"})
"""Routes that take a form."""

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,256}")


class Gate:
    """Gives each request an id, echoed as X-Request-Id; checks key, origin and content type; answers for exceptions.

    The scope of a request that passes has its `request_id`, its `api_key` (b"" if it came with none), whether that is an
    `admin` key, the `error_shape` of its path's dialect, and the file's `key` or None."""

    def __init__(self, app: ASGIApp, keys: Iterable[str], admin_keys: Iterable[str], origins: Iterable[str],
                 shapes: ErrorShapes, on_error: Callable[[BaseException], None], keys_file: KeyFile | None = None) -> None:
        """`keys` open all but ADMIN_ROUTES, `admin_keys` all, as a lone key does. Without keys browsers need `origins`."""
        self.app = app
        self.admin_keys = [key.encode() for key in admin_keys]
        self.keys = [*(key.encode() for key in keys), *self.admin_keys]
        self.keys_file = keys_file
        self.origins = set(origins)
        self.shapes = shapes
        self.on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        scope["request_id"] = request_id.decode()
        scope["began"] = time.time()
        scope["error_shape"] = shape = self.shapes.of(scope["path"])

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id), *ignored_header(scope),
                                      *(self.keys_file.headers(scope["key"]) if self.keys_file and scope["key"] else ())]
            await send(message)

        scope["api_key"] = key = _key(headers)
        scope["admin"] = bool(self.admin_keys) and _among(key, self.admin_keys)
        scope["key"] = None
        if scope["path"] not in OPEN_ROUTES and scope["method"] != "OPTIONS" and not is_page(scope["path"]):
            try:
                self._let_in(scope, key, scope["path"])
                refusal = self._cross_site(headers) or _no_json(scope["method"], scope["path"], headers)
            except RequestError as error:
                refusal = error
            if refusal is not None:
                headers_out = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else {}
                await error_response(refusal, shape, headers_out)(scope, receive, send_named)
                return
        try:
            await self.app(scope, receive, send_named)
        except Exception as error:
            if not isinstance(error, RequestError):
                self.on_error(error)
            if not scope["status"]:
                await error_response(as_request_error(error), shape)(scope, receive, send_named)
            elif not scope["complete"]:
                # The status has been sent already, so only breaking the connection can show the failure.
                raise
        finally:
            stream: Stream | None = scope.get("stream")
            if stream is not None and self.keys_file is not None and scope["key"] is not None:
                self.keys_file.spend(scope["key"], "tokens", stream.prompt_tokens + stream.output_tokens)

    def _cross_site(self, headers: dict[bytes, bytes]) -> RequestError | None:
        """The refusal of a request from another site's page in a browser, where no key protects the server."""
        origin = headers.get(b"origin")
        if self.keys or self.keys_file is not None or origin is None:
            return None
        text = origin.decode("latin-1")
        # A page of this server itself, by numeric address: a host name could be rebound to this address (DNS rebinding).
        own = text.partition("://")[2] == headers.get(b"host", b"").decode("latin-1") and _is_numeric(text)
        if own or text in self.origins or "*" in self.origins:
            return None
        return RequestError(f"pages of {text[:200]} may not use this server; start it with --allowed-origins or --api-key",
                            code="origin_not_allowed", status=403)

    def _let_in(self, scope: Scope, secret: bytes, path: str) -> None:
        """Checks a request's key; a key of the file makes it its tenant's. RequestError 401, 403 or 429."""
        file, known = self.keys_file, _among(secret, self.keys)
        key = None if file is None or known else file.find(secret)
        if key is None and not known and (self.keys or file is not None):
            raise RequestError("a valid key is needed: send Authorization: Bearer KEY, or x-api-key: KEY",
                               code="invalid_api_key", status=401)
        several, admin = len(self.keys) > 1 or file is not None, scope["admin"] or (key is not None and key.kind == "admin")
        if path in ADMIN_ROUTES and several and not admin:
            need = "send a key of the class admin" if key is not None else "send one of its --admin-api-key" \
                if self.admin_keys else "start the server with --admin-api-key, or make a key of the class admin"
            raise RequestError(f"{path} concerns all who use this server, so their own keys do not open it; {need}",
                               code="admin_key_needed", status=403)
        if file is not None and key is not None:
            scope["key"], scope["api_key"], scope["admin"] = key, b"tenant " + key.tenant.encode(), admin
            file.count(key)


def _no_json(method: str, path: str, headers: dict[bytes, bytes]) -> RequestError | None:
    """The refusal of a POST without a JSON content type. A browser sends JSON across origins only after asking (CORS); other
    types, and none, it sends at once, and this server may be a keyless one on the browser's own machine."""
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if method != "POST" or kind == b"application/json" or kind.endswith(b"+json"):
        return None
    # Ollama's API takes any type, and some POST routes have no body. The type does not tell a browser from a program then, but
    # a browser names itself: a page's POST has an Origin, which was checked, and Sec-Fetch-Site.
    programs = headers.get(b"sec-fetch-site", b"none") in (b"none", b"same-origin")
    bodiless = path in BODILESS_ROUTES or path.endswith("/cancel") or headers.get(b"content-length") == b"0"
    if programs and (bodiless or path.startswith("/api/")):
        return None
    if path in UPLOAD_ROUTES and kind == b"multipart/form-data":
        # A browser's form from another site has an Origin, which was checked.
        return None
    given = repr(kind.decode("latin-1")[:100]) if kind else "none"
    return RequestError(f"the body must be JSON: send Content-Type: application/json, not {given}",
                        code="unsupported_media_type", status=415)


def _is_numeric(origin: str) -> bool:
    """True if an origin's host is localhost or a numeric address."""
    try:
        host = urlsplit(origin).hostname or ""
        return host == "localhost" or bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def _key(headers: dict[bytes, bytes]) -> bytes:
    """The request's key, by HTTP's header or, as Anthropic's clients send it, by x-api-key."""
    kind, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if kind.lower() == b"bearer" else headers.get(b"x-api-key", b"").strip()


def _among(key: bytes, known: Iterable[bytes]) -> bool:
    # Compare with every key in constant time, so that the duration reveals nothing (timing attacks).
    return sum(hmac.compare_digest(key, one) for one in known) > 0
