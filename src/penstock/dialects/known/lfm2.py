"""Liquid LFM2: Python calls in a list between markers."""

from penstock.dialects.description import THINK, Block, Dialect, Json, Python, Written

DIALECTS = (
    Dialect("lfm2", (Block("<|tool_call_start|>", Python(), "<|tool_call_end|>"), Block("<|tool_call_start|>", Json(),
                                                                                        "<|tool_call_end|>")),
            Written("{name}({arguments})", "<|tool_call_start|>[", ", ", "]<|tool_call_end|>", "{key}={value}", ", "), THINK,
            signs=(("<|tool_call_start|>",), ("<|tool_list_start|>",), ("List of tools: [",)), rank=50),
)
