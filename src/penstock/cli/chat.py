"""Talk to a model in the terminal. MODEL is loaded here, canary if none is named; --url talks to a running server instead.
Ctrl-C stops the answer, not the program. Commands begin with a slash; /help lists them."""

import argparse
import contextlib
import importlib
import json
import re
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
from anyio.from_thread import BlockingPortal, start_blocking_portal

from penstock.cli.api import Api, add_target, complaint, model_or_canary, open_api
from penstock.config.flags import add_flags, nearest
from penstock.config.schema import option
from penstock.core.errors import ConfigError, PenstockError


def read_tools(path: str) -> list[dict[str, Any]]:
    """The tools in a file: a JSON list in OpenAI's form. ConfigError naming what is wrong."""
    try:
        tools = json.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the tools in {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(tools, list) or not tools or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(f'{path} must hold a JSON list of tools, [{{"type": "function", "function": {{"name": ...}}}}, ...]')
    return tools


class Calls:
    def __init__(self) -> None:
        self._parts: dict[int, dict[str, Any]] = {}

    def add(self, delta: dict[str, Any]) -> bool:
        """Takes what a chunk says of calls; False if it says nothing of them."""
        chunks = delta.get("tool_calls") or []
        for chunk in chunks:
            call = self._parts.setdefault(chunk.get("index", 0), {"id": "", "name": "", "arguments": "", "input": None})
            call["id"] = chunk.get("id") or call["id"]
            said = chunk.get("function") or chunk.get("custom") or {}
            call["name"] = said.get("name") or call["name"]
            call["arguments"] += said.get("arguments") or ""
            if "custom" in chunk:
                call["input"] = (call["input"] or "") + (said.get("input") or "")
        return bool(chunks)

    def whole(self) -> list[dict[str, Any]]:
        """The calls as an assistant message has them. A custom call is there a function of one text, as templates know it."""
        return [{"id": call["id"], "type": "function", "function": {
            "name": call["name"],
            "arguments": call["arguments"] if call["input"] is None else json.dumps({"input": call["input"]})}}
            for _, call in sorted(self._parts.items())]


QUOTES = '"""'

NO_TEMPLATE = re.compile("no chat template|provide a chat template|default chat template")
"""The errors by which servers, this one and vLLM, report a model without a chat template."""

COMMANDS = {
    "/help": "this list",
    "/reset": "forget the conversation, keep the system prompt",
    "/undo": "forget the last question and its answer",
    "/retry": "ask the last question again",
    "/system": "show the system prompt, or set it: /system You are terse.",
    "/stats": "switch the line of figures after each answer on or off",
    "/quit": "leave (so does Ctrl-D)",
    QUOTES: "begins and ends a text of several lines; a backslash at a line's end goes on in the next one, too"}


_sampling = partial(option, None, group="Sampling")


@dataclass(frozen=True, kw_only=True)
class ChatSampling:
    temperature: float | None = _sampling("0 is greedy; by default the model's own")
    top_p: float | None = _sampling("keep the most likely tokens with this much probability")
    top_k: int | None = _sampling("keep this many of the most likely tokens")
    min_p: float | None = _sampling("keep tokens at least this fraction as likely as the likeliest")
    presence_penalty: float | None = _sampling("discourage tokens that already occurred")
    frequency_penalty: float | None = _sampling("discourage tokens by how often they occurred")
    repetition_penalty: float | None = _sampling("divide the logits of tokens that occurred")
    max_tokens: int | None = _sampling("the longest answer; by default what the context allows")
    seed: int | None = _sampling("makes answers repeatable")
    stop: list[str] = option([], "string that ends an answer; may be repeated", group="Sampling", commas=False)


def add(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("--system", metavar="TEXT", default="", help="a system prompt")
    parser.add_argument("--plain", action="store_true",
                        help="no conversation: the model continues each line (for models without a chat template)")
    parser.add_argument("--tools", metavar="FILE", help="a JSON list of OpenAI's tools; calls are shown, and a line is read as "
                                                        "each one's result, JSON or text")
    parser.add_argument("--stats", action="store_true", help="print tokens per second after each answer")
    add_flags(parser, ChatSampling)


def run(args: argparse.Namespace) -> int:
    """Opens the model, then converses until the end of the input. 1 if input was piped and an answer failed."""
    if args.tools and args.plain:
        raise ConfigError("--tools needs a conversation; leave --plain out")
    args.tools = read_tools(args.tools) if args.tools else []
    if not args.url:
        args.model = model_or_canary(args)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(open_api(args)) as api:
        return Conversation(api, portal, args).converse()


class NoTemplateError(PenstockError):
    """The server cannot write out conversations for this model."""


@dataclass
class Figures:
    """Times (seconds) and token counts of one answer."""

    started: float
    first: float = 0.0
    ended: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    """As the server counted them at the end; 0 if the answer was stopped before."""
    chunks: int = 0

    def line(self) -> str:
        tokens = self.tokens or self.chunks  # a chunk is a token, unless the network was slow
        if not self.first or not tokens:
            return "(no tokens)"
        decode = self.ended - self.first
        rate = f", {(tokens - 1) / decode:.1f} tokens/s" if tokens > 1 and decode > 0 else ""
        wait = (self.first - self.started) * 1e3
        counts = f"{self.prompt_tokens} tokens in, {tokens} out" if self.tokens else f"stopped after about {tokens} tokens"
        return f"({counts}, first after {wait:.0f} ms{rate})"


@dataclass
class Answer:
    figures: Figures
    parts: list[str] = field(default_factory=list)
    calls: Calls = field(default_factory=Calls)


class Conversation:
    """The messages so far, and the loop that reads, asks and prints. The terminal belongs to the main thread, the network
    or the engine to `portal`'s, so that waiting for the user never stops the engine's heartbeat."""

    def __init__(self, api: Api, portal: BlockingPortal, args: argparse.Namespace) -> None:
        self.api, self.portal = api, portal
        self.system: str = args.system
        self.show_stats: bool = args.stats
        self.plain: bool = args.plain
        self.sampling = {name: getattr(args, name) for name in ChatSampling.__dataclass_fields__ if hasattr(args, name)}
        self.tools: list[dict[str, Any]] = args.tools
        self.messages: list[dict[str, Any]] = []
        self.interactive = sys.stdin.isatty()

    def converse(self) -> int:
        """Reads lines until the input ends."""
        failed = False
        if self.interactive:
            # Importing readline is what gives input() its history and editing; a Python built without it still reads lines.
            with contextlib.suppress(ImportError):
                importlib.import_module("readline")
            print(f"{self.api.model}. /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.")
        while True:
            try:
                line = self._read()
            except EOFError:
                if self.interactive:
                    print()
                return int(failed and not self.interactive)
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                print("\n(Ctrl-D leaves)")
                continue
            if not line:
                continue
            if line.startswith("/") and not line.startswith("//"):
                if line.split()[0] == "/quit":
                    return int(failed and not self.interactive)
                failed |= not self.command(line)
            else:
                failed |= not self.ask(line.removeprefix("/") if line.startswith("//") else line)

    def _read(self) -> str:
        """The next input: a line, or several lines between triple quotes or joined by backslashes."""
        lines: list[str] = []
        quoted = False
        while True:
            line = input(("... " if lines or quoted else "> ") if self.interactive else "")
            if line.strip().startswith(QUOTES) and not lines and not quoted:
                quoted, line = True, line.strip().removeprefix(QUOTES)
            if quoted and line.rstrip().endswith(QUOTES):
                lines.append(line.rstrip().removesuffix(QUOTES))
            elif quoted or line.endswith("\\"):
                lines.append(line if quoted else line[:-1])
                continue
            else:
                lines.append(line)
            return "\n".join(lines).strip()

    def command(self, line: str) -> bool:
        """Does what a slash command says; False if it could not."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/help":
            print("\n".join(f"  {command:8} {about}" for command, about in COMMANDS.items()))
        elif name == "/reset":
            self.messages.clear()
        elif name == "/undo":
            self._forget_last()
        elif name == "/retry":
            question = self._forget_last()
            return self.ask(question) if question is not None else True
        elif name == "/system":
            if rest:
                self.system = rest
            print(f"(system prompt: {self.system or 'none'})")
        elif name == "/stats":
            self.show_stats = not self.show_stats
        else:
            print(f"there is no command {name}{nearest(name, COMMANDS)} (// at the start sends a slash)", file=sys.stderr)
            return False
        return True

    def ask(self, question: str) -> bool:
        """Sends the conversation and `question`, prints the answer as it comes, and asks the user for results of calls.

        False if it failed; the question is then forgotten."""
        before = len(self.messages)
        self.messages.append({"role": "user", "content": question})
        try:
            while (calls := self._answer(question)):
                for call in calls:
                    self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": self._result(call)})
        except NoTemplateError:
            self.messages.clear()
            if self.tools:
                print("penstock: this model has no chat template, so that it cannot be told of --tools", file=sys.stderr)
                return False
            self.plain = True
            print("(this model has no chat template, so it continues each line by itself, as with --plain)", file=sys.stderr,
                  flush=True)
            return self.ask(question)
        except PenstockError as error:
            del self.messages[before:]
            print(f"penstock: {error}", file=sys.stderr, flush=True)
            return False
        except (EOFError, KeyboardInterrupt) as end:
            if isinstance(end, KeyboardInterrupt) and not self.interactive:
                raise
            del self.messages[before:]
            print("\n(the question is forgotten, because its call has no result)", file=sys.stderr, flush=True)
            return False
        return True

    def _result(self, call: dict[str, Any]) -> str:
        print(f"{call['function']['name']}({call['function']['arguments']})", flush=True)
        return input("result> " if self.interactive else "")

    def _answer(self, question: str) -> list[dict[str, Any]]:
        """Prints and keeps the next answer; its calls, which want results. PenstockError if it failed."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        asked = {"prompt": question} if self.plain else {"messages": head + self.messages}
        body = {"model": self.api.model, **asked, "stream": True, "stream_options": {"include_usage": True}, **self.sampling}
        if self.tools and not self.plain:
            body["tools"] = self.tools
        answer = Answer(Figures(time.perf_counter()))
        calls: list[dict[str, Any]] = []
        coming = self.portal.start_task_soon(self._stream, body, answer)
        try:
            coming.result()
        except KeyboardInterrupt:
            coming.cancel()
            self.portal.call(anyio.sleep, 0.01)  # until the stream is closed
            print(" (stopped)", flush=True)
        except PenstockError:
            if answer.parts:
                print(file=sys.stderr)
            raise
        else:
            calls = answer.calls.whole()
            if answer.parts or not calls:
                print(flush=True)
        called = {"tool_calls": calls} if calls else {}
        self.messages.append({"role": "assistant", "content": "".join(answer.parts), **called})
        if self.show_stats:
            print(answer.figures.line(), flush=True)
        return calls

    async def _stream(self, body: dict[str, Any], answer: Answer) -> None:
        """One answer: prints and collects its text. Raises PenstockError if the server refuses or breaks off."""
        path = "/v1/completions" if self.plain else "/v1/chat/completions"
        with contextlib.closing(await self.api.transport.send("POST", path, msgspec.json.encode(body))) as reply:
            if reply.status != 200:
                said = complaint(reply.status, await reply.read())
                if not self.plain and reply.status == 400 and NO_TEMPLATE.search(said):
                    raise NoTemplateError(said)
                raise PenstockError(said)
            async for event in reply.events():
                if event.data == b"[DONE]":
                    break
                self._take(json.loads(event.data), event.at, answer)

    def _take(self, chunk: dict[str, Any], at: float, answer: Answer) -> None:
        figures = answer.figures
        if "error" in chunk:
            raise PenstockError(str(chunk["error"].get("message", chunk["error"])))
        if usage := chunk.get("usage"):
            figures.prompt_tokens, figures.tokens = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in chunk.get("choices", ()):
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            if answer.calls.add(choice.get("delta", {})) or text:
                figures.first = figures.first or at
                figures.ended = at
                figures.chunks += 1
            if text:
                answer.parts.append(text)
                sys.stdout.write(text)
                sys.stdout.flush()

    def _forget_last(self) -> str | None:
        """Takes the last question and its answer away; returns the question."""
        while self.messages:
            message = self.messages.pop()
            if message["role"] == "user":
                return str(message["content"])
        print("(there is nothing to forget)")
        return None
