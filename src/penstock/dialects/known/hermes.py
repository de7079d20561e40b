"""Hermes: JSON between <tool_call> tags. Qwen 2.5 and 3, MiMo, Reka and many others write it, and so does canary."""

from penstock.dialects.description import THINK, Block, Dialect, Json, Reasoning, Written

WRITTEN = Written('<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>', separator="\n")
BLOCKS = (Block("<tool_call>", Json(), "</tool_call>"),)

DIALECTS = (
    Dialect("hermes", BLOCKS, WRITTEN, THINK, aliases=("qwen", "qwen25",
                                                                                                        "canary"),
            reasoning_names=("qwen3", "reka", "mimo"), signs=(("<tool_call>",),), rank=10),
    Dialect("scratch_pad", BLOCKS, WRITTEN, Reasoning(("<scratch_pad>",), ("</scratch_pad>",)),
            signs=(("<tool_call>", "<scratch_pad>"),), rank=11),
    Dialect("longcat", (Block("<longcat_tool_call>", Json(), "</longcat_tool_call>"),),
            Written('<longcat_tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</longcat_tool_call>',
                    separator="\n"),
            Reasoning(("<longcat_think>",), ("</longcat_think>",)), signs=(("<longcat_tool_call>",),), rank=60),
    Dialect("rwkv", reasoning=THINK, reasoning_names=("rwkv",)),
)
