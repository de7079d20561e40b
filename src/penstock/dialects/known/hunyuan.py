"""Hunyuan A13B and Apriel: a list of JSON between <tool_calls> tags."""

from penstock.dialects.description import Block, Dialect, Json, Reasoning, Written

BLOCKS = (Block("<tool_calls>", Json(), "</tool_calls>"),)
WRITTEN = Written('{{"name": "{name}", "arguments": {arguments}}}', "<tool_calls>[", ", ", "]</tool_calls>")
DIALECTS = (
    Dialect("hunyuan_a13b", BLOCKS, WRITTEN, Reasoning(("<think>",), ("</think>",)), ("<answer>\n", "<answer>", "\n</answer>",
                                                                                      "</answer>"),
            reasoning_names=("hunyuan_a13b",), signs=(("<tool_calls>[", "<answer>"), ("<tool_calls>[", "<|extra_")), rank=42),
    Dialect("apriel", BLOCKS, WRITTEN, Reasoning(("<thinking>",), ("</thinking>",)), ("[BEGIN FINAL RESPONSE]",
                                                                                      "[END FINAL RESPONSE]"),
            signs=(("<tool_calls>[", "<thinking>"), ("<tool_calls>[",)), rank=41),
)
