"""A list of JSON between markers: Hunyuan A13B, Apriel, AI21 Jamba, NVIDIA Nemotron Nano 2 (Nemotron 3 writes Qwen3-Coder's
tags), Phi-4 mini, Firefunction, and Salesforce xLAM, which may also write it bare or in a fence."""

from penstock.dialects.description import THINK, Block, Dialect, Json, Reasoning, Written

ITEM = '{{"name": "{name}", "arguments": {arguments}}}'
BLOCKS = (Block("<tool_calls>", Json(), "</tool_calls>"),)
WRITTEN = Written(ITEM, "<tool_calls>[", ", ", "]</tool_calls>")
SURE = Json(needs_arguments=True)
DIALECTS = (
    Dialect("hunyuan_a13b", BLOCKS, WRITTEN, Reasoning(("<think>",), ("</think>",)),
            ("<answer>\n", "<answer>", "\n</answer>", "</answer>"), reasoning_names=("hunyuan_a13b",),
            signs=(("<tool_calls>[", "<answer>"), ("<tool_calls>[", "<|extra_")), rank=42),
    Dialect("apriel", BLOCKS, WRITTEN, Reasoning(("<thinking>",), ("</thinking>",)),
            ("[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"),
            signs=(("<tool_calls>[", "<thinking>"), ("<tool_calls>[",)), rank=41),
    Dialect("jamba", BLOCKS, Written(ITEM, "<tool_calls>[\n    ", ",\n    ", "\n]</tool_calls>"), signs=(("<tool_calls>",),),
            rank=20),
    Dialect("nemotron_json", (Block("<TOOLCALL>", Json(), "</TOOLCALL>"),),
            Written(ITEM, "<TOOLCALL>[", ", ", "]</TOOLCALL>"), THINK, aliases=("nemotron_nano_v2", "nemotron"),
            reasoning_names=("nemotron",), signs=(("<TOOLCALL>",),), rank=50),
    Dialect("phi4_mini_json", (Block("functools", Json()), Block("<|tool_call|>", Json(), "<|/tool_call|>"),
                               Block("{", SURE, keep=True, first=True, bare=True)),
            Written(ITEM, "functools[", ", ", "]"), aliases=("firefunction",),
            signs=(("functools",), ("<|tool_call|>", "<|/tool_call|>")), rank=44),
    Dialect("xlam", (Block("[TOOL_CALLS]", SURE), Block("<tool_call>", SURE, "</tool_call>"),
                     Block("```json", SURE, "```", bare=True), Block("[", SURE, bare=True)),
            Written(ITEM, "[", ", ", "]"), THINK,
            signs=(('[{"name": "tool_call_name"',), ('"name": "tool_call_name"',)), rank=47, trims=True),
)
