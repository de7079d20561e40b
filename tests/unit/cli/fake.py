"""A tiny OpenAI-like ASGI application, and uvicorn serving it: answers that a test can predict, faults that it can ask for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn


class FakeApi:
    """Echoes: the answer to a prompt is its words, one chunk each. `max_tokens` caps them.

    A prompt of "busy" answers 503 for the first two times, "broken" answers 400, "slow" waits between chunks, "drip" does so
    for a hundred of them, "crash" breaks off, "mute" is one token without text, "endless" has neither text nor an end,
    "call" calls the first tool.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.waits: list[str | None] = []
        self.aborted = 0
        self.template_missing = False
        self.busy_left = 2
        self.running = self.most_running = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        content = b""
        while True:
            message = await receive()
            content += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = dict(scope["headers"])
        self.keys.append(headers.get(b"authorization", b"").decode() or None)
        self.waits.append(headers.get(b"x-penstock-wait", b"").decode() or None)
        if scope["path"] == "/v1/models":
            await self._json(send, 200, {"data": [{"id": "fake"}]})
        elif scope["path"] == "/health":
            await self._json(send, 200, {})
        elif scope["path"] in ("/v1/chat/completions", "/v1/completions"):
            self.running += 1
            self.most_running = max(self.running, self.most_running)
            try:
                await self._answer(json.loads(content), "chat" in scope["path"], receive, send)
            finally:
                self.running -= 1
        else:
            await self._json(send, 404, {"error": {"message": f"no {scope['path']}"}})

    async def _answer(self, body: dict[str, Any], chat: bool, receive: Any, send: Any) -> None:
        self.bodies.append(body)
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        words = prompt.split() if isinstance(prompt, str) else [f"t{i}" for i in prompt]
        if not isinstance(prompt, str):
            words = (words * 50)[: body["max_tokens"]]
        if chat and self.template_missing:
            await self._json(send, 400, {"error": {"message": "default chat template is no longer allowed, so you must provide "
                                                              "a chat template if the tokenizer does not define one."}})
            return
        if words == ["broken"]:
            await self._json(send, 400, {"error": {"message": "the prompt is broken", "param": "messages"}})
            return
        if words == ["busy"] and self.busy_left:
            self.busy_left -= 1
            await self._json(send, 503, {"error": {"message": "the queue is full"}})
            return
        usage = {"prompt_tokens": 7, "completion_tokens": len(words), "total_tokens": 7 + len(words)}
        if words == ["drip"]:
            words = ["drip"] * 100
        text = " ".join(words)
        if words[0] == "call" and body.get("tools"):
            await self._call(send, body["tools"][0]["function"]["name"], usage)
            return
        if not body.get("stream"):
            await asyncio.sleep(0.01)
            choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            await self._json(send, 200, {"id": "x-1", "choices": [{"index": 0, **choice}], "usage": usage})
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        if words[0] in ("mute", "endless"):
            reason = "length" if words[0] == "mute" else None
            choice = {"delta": {"content": ""}} if chat else {"text": ""}
            if reason or chat:
                await self._event(send, {"id": "x-1", "choices": [{"index": 0, **choice, "finish_reason": reason}]})
            await self._event(send, {"id": "x-1", "choices": [], "usage": usage | {"completion_tokens": 1}})
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
            return
        gone = asyncio.create_task(self._until_gone(receive))
        for i, word in enumerate(words):
            if gone.done():
                self.aborted += 1
                return
            piece = word if i == 0 else " " + word
            choice = {"delta": {"content": piece}} if chat else {"text": piece}
            await self._event(send, {"id": "x-1", "choices": [{"index": 0, **choice}]})
            await asyncio.sleep(0.05 if {"slow", "drip"} & set(words) else 0.001)
            if word == "crash":
                raise RuntimeError("the application fails in the middle of an answer, as asked")
        gone.cancel()
        await self._event(send, {"id": "x-1", "choices": [], "usage": usage})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _call(self, send: Any, name: str, usage: dict[str, int]) -> None:
        """A streamed tool call in pieces, with the arguments {"n": 1}."""
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for said in ({"index": 0, "id": "call_1", "type": "function", "function": {"name": name, "arguments": ""}},
                     {"index": 0, "function": {"arguments": '{"n"'}}, {"index": 0, "function": {"arguments": ": 1}"}}):
            await self._event(send, {"id": "x-1", "choices": [{"index": 0, "delta": {"tool_calls": [said]}}]})
        await self._event(send, {"id": "x-1", "choices": [], "usage": usage})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    @staticmethod
    async def _until_gone(receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    @staticmethod
    async def _event(send: Any, content: dict[str, Any]) -> None:
        body = b"data: " + json.dumps(content).encode() + b"\n\n"
        await send({"type": "http.response.body", "body": body, "more_body": True})

    @staticmethod
    async def _json(send: Any, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@contextlib.contextmanager
def served(app: Any) -> Iterator[str]:
    """Serves `app` on a free port of the loopback from a thread; yields its URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started:
        assert time.monotonic() < deadline, "the fake server did not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(5)
