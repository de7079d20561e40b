"""Phi-4 mini and Firefunction: functools and a list, or a list between markers."""

from penstock.dialects.description import Block, Dialect, Json, Written

ITEM = '{{"name": "{name}", "arguments": {arguments}}}'
DIALECTS = (
    Dialect("phi4_mini_json", (Block("functools", Json()), Block("<|tool_call|>", Json(), "<|/tool_call|>")),
            Written(ITEM, "functools[", ", ", "]"), aliases=("firefunction",),
            signs=(("functools",), ("<|tool_call|>", "<|/tool_call|>")), rank=44),
)
