"""Salesforce xLAM: a bare list of JSON, or one in a fence or between borrowed markers."""

from penstock.dialects.description import THINK, Block, Dialect, Json, Written

JSON = Json(needs_arguments=True)
DIALECTS = (
    Dialect("xlam", (Block("[TOOL_CALLS]", JSON), Block("<tool_call>", JSON, "</tool_call>"),
                     Block("```json", JSON, "```", bare=True), Block("[", JSON, bare=True)),
            Written('{{"name": "{name}", "arguments": {arguments}}}', "[", ", ", "]"), THINK,
            signs=(('[{"name": "tool_call_name"',), ('"name": "tool_call_name"',)), rank=47),
)
