"""Baidu Ernie 4.5: Hermes' tags, and a response tag around the answer."""

from penstock.dialects.description import Block, Dialect, Json, Reasoning, Written

DIALECTS = (
    Dialect("ernie45", (Block("<tool_call>", Json(), "</tool_call>"),),
            Written('<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>', separator="\n"),
            Reasoning(("<think>",), ("</think>",), implicit=True), ("<response>\n", "<response>", "\n</response>",
                                                                    "</response>"),
            reasoning_names=("ernie45",), signs=(("<tool_call>", "<response>"),), rank=30),
)
