"""The access log: one line for each request that has ended, at info. Prompts and answers never enter it."""

import time
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.engine.ledger import rounded
from penstock.engine.stream import Stream
from penstock.observe.log import LOG
from penstock.server.gate import PROBES

_LONGEST_PATH = 200


class AccessLog:
    """Pure ASGI around everything else. Probes are logged at debug, or they would drown the rest."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        try:
            await self.app(scope, receive, send)
        finally:
            seconds = time.monotonic() - began
            write = LOG.debug if scope["path"] in PROBES else LOG.info
            # The raw path is still percent-encoded, so that no request can write lines of its own into the log.
            path = (scope.get("raw_path") or scope["path"].encode())[:_LONGEST_PATH].decode("ascii", "backslashreplace")
            write("%s %s %s in %.3f s%s%s [%s]", scope["method"], path, scope["status"] or "no answer", seconds,
                  _tokens(scope.get("stream")), "" if scope["complete"] else ", the client left", scope.get("request_id", "-"),
                  extra={"fields": _fields(scope, path, seconds)})


def _fields(scope: Scope, path: str, seconds: float) -> dict[str, Any]:
    """The same for a log of JSON objects."""
    stream: Stream | None = scope.get("stream")
    counts: dict[str, Any] = {} if stream is None else {
        "prompt_tokens": stream.prompt_tokens, "cached_tokens": stream.cached_tokens, "output_tokens": stream.output_tokens,
        "finish_reasons": list(stream.ends)}
    if stream is not None and stream.ledger:
        # The engine's part, how long its answer took to be sent, and what came before the engine: parsing, template, tokens.
        sent = max(0.0, time.time() - stream.ledger_at)
        parts = {**stream.ledger, "sent": sent, "total": stream.ledger["total"] + sent}
        counts["ledger"] = rounded({**parts, "received": max(0.0, seconds - parts["total"])})
    return {"request_id": scope.get("request_id"), "method": scope["method"], "path": path, "status": scope["status"],
            "seconds": round(seconds, 6), "complete": scope["complete"], **counts}


def _tokens(stream: Stream | None) -> str:
    """The log line's fields on tokens: the request's prompt, cached and generated tokens."""
    if stream is None:
        return ""
    cached = f" ({stream.cached_tokens} cached)" if stream.cached_tokens else ""
    ends = ", ".join(stream.ends)
    return f": {stream.prompt_tokens} tokens in{cached}, {stream.output_tokens} out{ends and ', ' + ends}"
