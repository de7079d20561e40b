"""An answer as a row of blocks, one after another: reasoning, text and calls, as the APIs beside OpenAI's chat show it."""

import json
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from penstock.dialects.message import Arguments, CallBegins, CallEnds, CallFails, Content, Event, ReasoningText
from penstock.dialects.parser import Parser
from penstock.engine.outputs import Delta

Kind = Literal["text", "reasoning", "call"]


@dataclass(slots=True)
class Block:
    """One block, as far as it has come."""

    index: int
    kind: Kind
    id: str = ""
    name: str = ""
    text: str = ""
    """For a call its arguments, as JSON text."""
    failed: bool = False
    """A call that turned out malformed: it is none, and its text follows as text."""

    def arguments(self) -> Any:
        """A call's arguments; {} if the answer's end has cut them off."""
        try:
            return json.loads(self.text) if self.text else {}
        except ValueError:
            return {}


class Change(NamedTuple):
    """A change of a block: it begins, grows by `text`, or ends."""

    what: Literal["begin", "add", "end"]
    block: Block
    text: str = ""


class Blocks:
    def __init__(self, parser: Parser, one_call: bool = False) -> None:
        """`one_call`: calls after the first are left out."""
        self.all: list[Block] = []
        self._parser = parser
        self._one_call = one_call
        self._open: Block | None = None
        self._calls: dict[int, Block] = {}

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.all if block.kind == "call" and not block.failed]

    def push(self, text: str, ended: bool) -> list[Change]:
        """Returns the changes that this text makes certain. With `ended` the answer is over, and so is its last block."""
        changes: list[Change] = []
        for event in self._parser.push(text) + (self._parser.finish() if ended else []):
            self._take(event, changes)
        if ended:
            self._close(changes)
        return changes

    def _take(self, event: Event, changes: list[Change]) -> None:
        match event:
            case Content(text):
                self._grow("text", text, changes)
            case ReasoningText(text):
                self._grow("reasoning", text, changes)
            case CallBegins(number, call_id, name) if not (self._one_call and self.calls):
                self._close(changes)
                self._calls[number] = self._begin(Block(len(self.all), "call", call_id, name), changes)
            case Arguments(number, text) if number in self._calls and text:
                self._calls[number].text += text
                changes.append(Change("add", self._calls[number], text))
            case CallEnds(number) if self._calls.get(number) is self._open:
                self._close(changes)
            case CallFails(number) if number in self._calls:
                self._calls[number].failed = True
                if self._calls.pop(number) is self._open:
                    self._close(changes)

    def _grow(self, kind: Kind, text: str, changes: list[Change]) -> None:
        if not text:
            return
        if self._open is None or self._open.kind != kind:
            self._close(changes)
            self._begin(Block(len(self.all), kind), changes)
        assert self._open is not None
        self._open.text += text
        changes.append(Change("add", self._open, text))

    def _begin(self, block: Block, changes: list[Change]) -> Block:
        self.all.append(block)
        self._open = block
        changes.append(Change("begin", block))
        return block

    def _close(self, changes: list[Change]) -> None:
        if self._open is not None:
            changes.append(Change("end", self._open))
            self._open = None


class BlocksAnswer:
    """The common part of answers that are rows of blocks, built from the deltas of one sequence."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.output_tokens = self.cached_tokens = 0
        self.end: Delta | None = None
        """The last delta."""

    def take(self, delta: Delta) -> list[Change]:
        """Returns the changes that a delta makes certain."""
        self.output_tokens += len(delta.token_ids)
        self.cached_tokens = delta.cached_tokens or self.cached_tokens
        if delta.finish_reason is not None:
            self.end = delta
        return self.blocks.push(delta.text, delta.finish_reason is not None)

    def add(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self.take(delta)
