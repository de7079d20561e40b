"""Phi-4 mini and Firefunction: functools and a list, a list between markers, or an object alone."""

from penstock.dialects.description import Block, Dialect, Json, Written

ITEM = '{{"name": "{name}", "arguments": {arguments}}}'
DIALECTS = (
    Dialect("phi4_mini_json", (Block("functools", Json()), Block("<|tool_call|>", Json(), "<|/tool_call|>"),
                               Block("{", Json(needs_arguments=True), keep=True, first=True, bare=True)),
            Written(ITEM, "functools[", ", ", "]"), aliases=("firefunction",),
            signs=(("functools",), ("<|tool_call|>", "<|/tool_call|>")), rank=44),
)
