"""The lines of a batch: what they ask, whether they can be asked, and their answers in the store."""

import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from penstock.server.store import Database

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages", "/pooling", "/score",
             "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/classify")
"""Routes that a batch may ask; all have a priority and answer whole."""

DUPLICATE = "duplicate_custom_id"

MAX_LINES, MAX_ERRORS = 50_000, 100
"""Of a file, and the most faulty ones that are told of."""


class RefusedLineError(Exception):
    """A line that cannot be asked, with OpenAI's code of the fault."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.custom_id = code, message, custom_id


class Ask(NamedTuple):
    custom_id: str
    url: str
    body: dict[str, Any]
    place: int = 0
    """Among the lines of its file."""


def read_line(raw: bytes, urls: Sequence[str]) -> Ask:
    """A line that asks one of these routes. RefusedLineError for any other."""
    try:
        line = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RefusedLineError("invalid_json_line", f"the line is not JSON: {error}") from None
    if not isinstance(line, dict):
        raise RefusedLineError("invalid_json_line", "the line must be an object with custom_id, method, url and body")
    name, method, url, body = (line.get(field) for field in ("custom_id", "method", "url", "body"))
    if not isinstance(name, str) or not name:
        raise RefusedLineError("missing_custom_id", "custom_id must be a text that no other line has")
    if method not in (None, "POST"):
        raise RefusedLineError("invalid_method", f"method is {method!r}; possible is POST", name)
    if not isinstance(url, str) or url not in urls:
        raise RefusedLineError("invalid_url", f"url is {url!r}; possible here: {', '.join(urls)}", name)
    if not isinstance(body, dict) or body.get("stream") or body.get("background"):
        raise RefusedLineError("invalid_body", "body must be the request as the API takes it, without stream and background",
                               name)
    return Ask(name, url, body)


def duplicate(ask: Ask) -> RefusedLineError:
    """The refusal of a line whose custom_id an earlier one has."""
    return RefusedLineError(DUPLICATE, f"an earlier line has the custom_id {ask.custom_id[:100]!r}", ask.custom_id)


def parse(content: bytes, endpoint: str) -> tuple[list[Ask], list[dict[str, Any]]]:
    """(lines, errors): with any error none may be asked, as OpenAI does it."""
    asks, errors, seen = list[Ask](), list[dict[str, Any]](), set[str]()
    for number, raw in enumerate(content.splitlines(), 1):
        if not raw.strip():
            continue
        try:
            ask = read_line(raw, (endpoint,))
            if ask.custom_id in seen:
                raise duplicate(ask)
        except RefusedLineError as refused:
            if len(errors) < MAX_ERRORS:
                errors.append({"code": refused.code, "line": number, "message": refused.message, "param": None})
        else:
            asks.append(ask._replace(place=len(asks)))
            seen.add(ask.custom_id)
    if not asks and not errors:
        errors.append({"code": "empty_file", "line": None, "message": "the file has no lines", "param": None})
    if len(asks) > MAX_LINES:
        errors.append({"code": "too_many_lines", "line": None, "param": None,
                       "message": f"the file has {len(asks)} lines; at most {MAX_LINES} are possible"})
    return asks, errors


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
