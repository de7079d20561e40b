"""AI21 Jamba: a list of JSON between <tool_calls> tags on lines of their own."""

from penstock.dialects.description import Block, Dialect, Json, Written

DIALECTS = (
    Dialect("jamba", (Block("<tool_calls>", Json(), "</tool_calls>"),),
            Written('{{"name": "{name}", "arguments": {arguments}}}', "<tool_calls>[\n    ", ",\n    ", "\n]</tool_calls>"),
            signs=(("<tool_calls>",),), rank=20),
)
