"""One graded prompt: its conversation, its canonical answer, and whether an answer is right. Owns grading, no prompts.

Training prompts and graded prompts are held apart by construction: every prompt has a `key`, the substance of its question
without its wording, and a hash of it says on which side it is (`held_out`). Each side discards the other's."""

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

HELD_OUT_SHARE = 8
"""One prompt in this many is for grading and never trained on."""

_THOUGHT = re.compile(r"^\s*(?:<think>)?.*?</think>", re.DOTALL)
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Item:
    """A prompt and what is expected.

    `answer` is the canonical answer, what the model is trained to write, thought included; `grade` says how others are judged:
    "exact" (the text after any thought, without surrounding space), "json" (equal values), "call" (one call of a tool with
    equal arguments) or "holds" (the text contains `expected`). `thinking` asks the chat template for a thought."""

    skill: str
    key: str
    messages: Sequence[Mapping[str, Any]]
    answer: str
    grade: str = "exact"
    expected: str = ""
    tools: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    thinking: bool = False

    @property
    def held_out(self) -> bool:
        """True for prompts that are for grading, False for those that may be trained on."""
        return zlib.crc32(f"{self.skill}|{self.key}".encode()) % HELD_OUT_SHARE == 0

    def right(self, text: str, calls: Sequence[Mapping[str, Any]] = (), *, stopped: bool = True) -> bool:
        """Whether an answer is right: its text, and the tool calls if the server has parsed them, as {"name", "arguments"}.

        `stopped` is False if the answer ran into its token limit: the model did not know when to stop, so it is wrong."""
        if not stopped or (self.thinking and "</think>" not in text and "<think>" in text):
            return False
        said = _THOUGHT.sub("", text).strip()
        if self.grade == "call":
            made = [{"name": call.get("name"), "arguments": _values(given) if isinstance(given, str) else given}
                    for call in calls or parse_calls(said) for given in (call.get("arguments"),)]
            return made == parse_calls(self.answer)
        if self.grade == "json":
            return bool(_values(said) == _values(self.answer) is not None)
        return self.expected in said if self.grade == "holds" else said == _THOUGHT.sub("", self.answer).strip()


def parse_calls(text: str) -> list[dict[str, Any]]:
    """The tool calls written in a text as canary writes them; those that are not JSON objects are left out."""
    return [call for call in map(_values, _CALL.findall(text)) if isinstance(call, dict)]


def _values(text: str) -> Any:
    """The JSON values of a text, or None. An integer and a float of equal value are equal."""
    try:
        return json.loads(text)
    except ValueError:
        return None
