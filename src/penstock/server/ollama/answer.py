"""Ollama's answers: one JSON object a line while streamed, one object when whole."""

from typing import Any

import msgspec

from penstock.engine.outputs import Delta
from penstock.server.answer import utc
from penstock.server.blocks import Blocks, BlocksAnswer, Change
from penstock.server.openai.logprobs import Namer, chat_content


def line(value: Any) -> bytes:
    """One line of a stream."""
    return msgspec.json.encode(value) + b"\n"


class OllamaAnswer(BlocksAnswer):
    """Builds the answer to one request from deltas."""

    def __init__(self, model: str, prompt_tokens: int, blocks: Blocks, *, chat: bool, thinking: bool,
                 namer: Namer | None) -> None:
        """`chat`: a message, else a response; `thinking`: whether it is shown; `namer`: of log probabilities, if wanted."""
        super().__init__(blocks)
        self.model = model
        self._prompt_tokens = prompt_tokens
        self._chat = chat
        self._thinking = thinking
        self._namer = namer
        self._entries: list[Any] = []

    def events(self, deltas: list[Delta]) -> bytes:
        found = []
        for delta in deltas:
            changes, entries = self.take(delta), self._scored(delta)
            said = self._said([change for change in changes if change.what == "add"], [c for c in changes if c.what == "end"])
            if said or entries:
                found.append(line({"model": self.model, "created_at": utc(), **self._shown(said), **entries, "done": False}))
        return b"".join(found)

    def last_events(self) -> bytes:
        return line({"model": self.model, "created_at": utc(), **self._shown({}), **self._last()})

    def add(self, deltas: list[Delta]) -> None:
        super().add(deltas)
        self._entries += [entry for delta in deltas for entry in self._scored(delta).get("logprobs", ())]

    def whole(self) -> dict[str, Any]:
        grown = [Change("add", block, block.text) for block in self.blocks.all if block.kind != "call"]
        said = self._said(grown, [Change("end", block) for block in self.blocks.calls])
        entries = {"logprobs": self._entries} if self._namer is not None else {}
        return {"model": self.model, "created_at": utc(), **self._shown(said), **entries, **self._last()}

    def _scored(self, delta: Delta) -> dict[str, Any]:
        if self._namer is None or not delta.logprobs:
            return {}
        return {"logprobs": [msgspec.json.decode(entry) for entry in chat_content(delta.logprobs, self._namer)]}

    def _said(self, grown: list[Change], ended: list[Change]) -> dict[str, Any]:
        """The fields of a message that are new. A call is shown when it is whole."""
        said: dict[str, Any] = {}
        for change in grown:
            name = {"text": "content", "reasoning": "thinking"}.get(change.block.kind)
            if name is not None and (name == "content" or self._thinking):
                said[name] = said.get(name, "") + change.text
        calls = [{"id": change.block.id, "function": {"index": place, "name": change.block.name,
                                                      "arguments": change.block.arguments()}}
                 for change in ended if change.block.kind == "call" and not change.block.failed
                 for place in (self.blocks.calls.index(change.block),)]
        return {**said, "tool_calls": calls} if calls else said

    def _shown(self, said: dict[str, Any]) -> dict[str, Any]:
        if self._chat:
            return {"message": {"role": "assistant", "content": "", **said}}
        return {"response": said.get("content", ""), **({"thinking": said["thinking"]} if "thinking" in said else {})}

    def _last(self) -> dict[str, Any]:
        end = self.end
        times = end.timings if end is not None else None
        spans = (0.0, 0.0, 0.0) if times is None else (
            times.finished - times.arrival, (times.first_token or times.finished) - (times.first_scheduled or times.arrival),
            times.finished - (times.first_token or times.finished))
        total, prompt, output = (max(0, int(seconds * 1e9)) for seconds in spans)
        return {"done": True, "done_reason": "length" if end is not None and end.finish_reason == "length" else "stop",
                "total_duration": total, "load_duration": 0, "prompt_eval_count": self._prompt_tokens,
                "prompt_eval_duration": prompt, "eval_count": self.output_tokens, "eval_duration": output}
