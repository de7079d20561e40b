"""The lines of a batch: what they ask, whether they can be asked, and their answers in the store."""

from __future__ import annotations

import uuid
from typing import Any, NamedTuple

import msgspec

from penstock.server.store import Database

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages", "/pooling", "/score",
             "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/classify")
"""Routes that a batch may ask; all have a priority and answer whole."""

MAX_LINES = 50_000
MAX_ERRORS = 100
"""Faulty lines that are told of at most."""


class Ask(NamedTuple):
    """One line."""

    place: int
    custom_id: str
    body: dict[str, Any]


def parse(content: bytes, endpoint: str) -> tuple[list[Ask], list[dict[str, Any]]]:
    """(lines, errors): with any error none may be asked, as OpenAI does it."""
    asks, errors, seen = list[Ask](), list[dict[str, Any]](), set[str]()
    for number, raw in enumerate(content.splitlines(), 1):
        if not raw.strip():
            continue
        fault = _fault(raw, endpoint, seen)
        if isinstance(fault, Ask):
            asks.append(fault._replace(place=len(asks)))
            seen.add(fault.custom_id)
        elif len(errors) < MAX_ERRORS:
            errors.append({"code": fault[0], "line": number, "message": fault[1], "param": None})
    if not asks and not errors:
        errors.append({"code": "empty_file", "line": None, "message": "the file has no lines", "param": None})
    if len(asks) > MAX_LINES:
        errors.append({"code": "too_many_lines", "line": None, "param": None,
                       "message": f"the file has {len(asks)} lines; at most {MAX_LINES} are possible"})
    return asks, errors


def _fault(raw: bytes, endpoint: str, seen: set[str]) -> Ask | tuple[str, str]:
    try:
        line = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return "invalid_json_line", f"the line is not JSON: {error}"
    if not isinstance(line, dict):
        return "invalid_json_line", "the line must be an object with custom_id, method, url and body"
    name, method, url, body = (line.get(field) for field in ("custom_id", "method", "url", "body"))
    if not isinstance(name, str) or not name:
        return "missing_custom_id", "custom_id must be a text that no other line has"
    if name in seen:
        return "duplicate_custom_id", f"an earlier line has the custom_id {name[:100]!r}"
    if method != "POST":
        return "invalid_method", f"method is {method!r}; possible is POST"
    if url != endpoint:
        return "invalid_url", f"url is {url!r}, but the batch is for {endpoint}"
    if not isinstance(body, dict) or body.get("stream") or body.get("background"):
        return "invalid_body", "body must be the request as the API takes it, without stream and background"
    return Ask(0, name, body)


def answer_of(custom_id: str, request_id: str, status: int, body: Any, error: dict[str, str] | None = None) -> bytes:
    """A line of the output, or of the error file."""
    response = None if error is not None else {"status_code": status, "request_id": request_id, "body": body}
    return msgspec.json.encode({"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response,
                                "error": error})


def write_answer(database: Database, batch: str, ask: Ask, answer: bytes, failed: bool) -> None:
    """Keeps the answer of a line; the first one counts."""
    database.sql("insert or ignore into lines values(?,?,?,?,?)", batch, ask.place, ask.custom_id, answer, int(failed))


def answered(database: Database, batch: str) -> tuple[set[int], int]:
    """(places of the answered lines, how many of them failed)."""
    rows = database.sql("select place, failed from lines where batch=?", batch).fetchall()
    return {place for place, _ in rows}, sum(failed for _, failed in rows)


def written(database: Database, batch: str, failed: bool) -> bytes:
    """The answers that succeeded, or failed, as a file's content, in the order of the input."""
    rows = database.sql("select answer from lines where batch=? and failed=? order by place", batch, int(failed))
    return b"".join(answer + b"\n" for answer, in rows)
