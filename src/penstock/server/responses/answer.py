"""A response as it grows: its output items, its events in order, and the whole object."""

import base64
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from penstock.engine.outputs import Delta
from penstock.server.blocks import Block, Blocks, BlocksAnswer, Change
from penstock.server.openai.answers import Namer, chat_content
from penstock.server.openai.reading import custom_input
from penstock.server.responses import protocol as r

_PREFIX = {"text": "msg", "reasoning": "rs", "call": "fc"}


def describe(response_id: str, model: str, body: r.ResponseRequest, conversation: str | None) -> dict[str, Any]:
    """The object of a response that has not begun."""
    shown = msgspec.to_builtins(body, str_keys=True)
    text = shown.get("text") or {}
    return {
        "id": response_id, "object": "response", "created_at": int(time.time()),
        "status": "queued" if body.background else "in_progress", "completed_at": None,
        "background": bool(body.background), "error": None, "incomplete_details": None, "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens, "max_tool_calls": None, "model": model, "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False, "previous_response_id": body.previous_response_id,
        "conversation": None if conversation is None else {"id": conversation}, "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": (shown.get("reasoning") or {}).get("effort"), "summary": None},
        "safety_identifier": body.safety_identifier, "service_tier": "default", "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": text.get("format") or {"type": "text"}, "verbosity": text.get("verbosity") or "medium"},
        "tool_choice": shown.get("tool_choice") or "auto", "tools": shown.get("tools") or [],
        "top_logprobs": body.top_logprobs or 0, "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled", "usage": None, "user": body.user, "metadata": body.metadata or {}}


class ResponseAnswer(BlocksAnswer):
    """Builds one response from deltas. `finished` is told of it once it has ended, however it did."""

    def __init__(self, response: dict[str, Any], prompt_tokens: int, blocks: Blocks, namer: Namer | None,
                 body: r.ResponseRequest, finished: "Callable[[ResponseAnswer], None]") -> None:
        """`namer` None: no log probabilities are wanted."""
        super().__init__(blocks)
        self.response = response
        self._prompt_tokens = prompt_tokens
        self._namer = namer
        self._finished = finished
        self._custom = {tool.name for tool in body.tools or () if isinstance(tool, r.CustomTool)}
        self._encrypted = "reasoning.encrypted_content" in (body.include or ())
        self._items: dict[int, dict[str, Any]] = {}
        """The item of each block."""
        self._logprobs: dict[int, list[Any]] = {}
        self._sequence = self._reasoned = 0

    # -- the protocol of `respond`, and the events before the first delta

    def opening(self) -> bytes:
        names = ("response.created", *(("response.queued",) if self.response["status"] == "queued" else ()))
        return self._written({"type": name, "response": self.response} for name in names)

    def started(self) -> bytes:
        """The engine has taken the request in."""
        self.response["status"] = "in_progress"
        return self._written([{"type": "response.in_progress", "response": self.response}])

    def events(self, deltas: list[Delta]) -> bytes:
        return self._written(one for delta in deltas for one in self._steps(delta))

    def last_events(self) -> bytes:
        return self._written(self._finish())

    def add(self, deltas: list[Delta]) -> None:
        deque((step for delta in deltas for step in self._steps(delta)), 0)

    def whole(self) -> dict[str, Any]:
        deque(self._finish(), 0)
        return self.response

    def failed(self, body: Any) -> bytes:
        """The last event of a response that an error has ended; `body` is the error's."""
        self.response["error"] = {"code": "server_error", "message": body["error"]["message"]}
        return self._written(self._ended("failed"))

    # -- events

    def _written(self, events: Iterable[dict[str, Any]]) -> bytes:
        # Each is encoded before the next one changes the response.
        parts: list[bytes] = []
        for place, found in enumerate(events, self._sequence):
            self._sequence = place + 1
            numbered = {"type": found["type"], "sequence_number": place, **found}
            parts.append(b"event: %b\ndata: %b\n\n" % (found["type"].encode(), msgspec.json.encode(numbered)))
        return b"".join(parts)

    def _steps(self, delta: Delta) -> Iterator[dict[str, Any]]:
        changes = self.take(delta)
        last = self.blocks.all[-1] if self.blocks.all else None
        if last is not None and last.kind == "reasoning":
            self._reasoned += len(delta.token_ids)
        lines: list[Any] = []
        if self._namer is not None and delta.logprobs and last is not None and last.kind == "text":
            # A token belongs to the text that it arrives with.
            lines = [msgspec.json.decode(line) for line in chat_content(delta.logprobs, self._namer)]
            self._logprobs.setdefault(last.index, []).extend(lines)
        for change in changes:
            yield from self._change(change, lines)

    def _change(self, change: Change, lines: list[Any]) -> Iterator[dict[str, Any]]:
        block = change.block
        if change.what == "begin":
            item = self._items[block.index] = self._item(block)
            self.response["output"].append(item)
            yield {"type": "response.output_item.added", "output_index": block.index, "item": item}
            if block.kind != "call":
                yield {"type": "response.content_part.added", **self._place(block), "content_index": 0,
                       "part": _part(block.kind, "")}
        elif change.what == "add":
            if block.kind == "call":
                if block.name not in self._custom:
                    yield {"type": "response.function_call_arguments.delta", **self._place(block), "delta": change.text}
            else:
                extra = {"logprobs": lines} if block.kind == "text" else {}
                yield {"type": f"response.{_part(block.kind, '')['type']}.delta", **self._place(block), "content_index": 0,
                       "delta": change.text, **extra}
        else:
            yield from self._close(block)

    def _close(self, block: Block) -> Iterator[dict[str, Any]]:
        item, place = self._items[block.index], self._place(block)
        cut = self.end is not None and self.end.finish_reason == "length"
        if block.kind == "call":
            if block.name in self._custom and not block.failed:
                item["input"] = custom_input(block.text) if block.text else ""
                yield {"type": "response.custom_tool_call_input.delta", **place, "delta": item["input"]}
                yield {"type": "response.custom_tool_call_input.done", **place, "input": item["input"]}
            elif block.name not in self._custom:
                item["arguments"] = block.text
                yield {"type": "response.function_call_arguments.done", **place, "name": block.name, "arguments": block.text}
        else:
            part = _part(block.kind, block.text, self._logprobs.get(block.index, []))
            item["content"] = [part]
            extra = {"logprobs": part["logprobs"]} if block.kind == "text" else {}
            yield {"type": f"response.{part['type']}.done", **place, "content_index": 0, "text": block.text, **extra}
            yield {"type": "response.content_part.done", **place, "content_index": 0, "part": part}
            if block.kind == "reasoning" and self._encrypted:
                # Readable by whoever has it: it saves stateless clients nothing but the keeping of another field.
                item["encrypted_content"] = base64.b64encode(block.text.encode()).decode()
        item["status"] = "incomplete" if block.failed or cut else "completed"
        yield {"type": "response.output_item.done", "output_index": block.index, "item": item}

    def _item(self, block: Block) -> dict[str, Any]:
        custom = block.kind == "call" and block.name in self._custom
        name = f"{'ctc' if custom else _PREFIX[block.kind]}_{self.response['id'].removeprefix('resp_')}{block.index:x}"
        if block.kind == "text":
            return {"id": name, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        if block.kind == "reasoning":
            return {"id": name, "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
        kind, field = ("custom_tool_call", "input") if custom else ("function_call", "arguments")
        return {"id": name, "type": kind, "status": "in_progress", "call_id": block.id, "name": block.name, field: ""}

    def _place(self, block: Block) -> dict[str, Any]:
        return {"item_id": self._items[block.index]["id"], "output_index": block.index}

    # -- the end

    def _finish(self) -> Iterator[dict[str, Any]]:
        end = self.end.finish_reason if self.end is not None else "abort"
        kind = {"stop": "completed", "length": "incomplete"}.get(end or "", "cancelled")
        if kind == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        yield from self._ended(kind)

    def cancel(self) -> None:
        """Ends the response because its client wants that."""
        deque(self._ended("cancelled"), 0)

    def _ended(self, status: str) -> Iterator[dict[str, Any]]:
        response = self.response
        # A call that turned out to be none stands in the text.
        failed = {self._items[block.index]["id"] for block in self.blocks.all if block.failed}
        response["output"] = [item for item in response["output"] if item["id"] not in failed]
        response["status"] = status
        response["completed_at"] = int(time.time()) if status == "completed" else None
        response["usage"] = {
            "input_tokens": self._prompt_tokens, "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens, "output_tokens_details": {"reasoning_tokens": self._reasoned},
            "total_tokens": self._prompt_tokens + self.output_tokens}
        self._finished(self)
        yield {"type": f"response.{status}", "response": response}


def _part(kind: str, text: str, logprobs: list[Any] | None = None) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}

