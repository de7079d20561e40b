"""Tool calls of `penstock chat`: reads the tools' file, and gathers calls from the chunks of a streamed answer."""

import json
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError


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
    """The calls of one answer, as they come."""

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
