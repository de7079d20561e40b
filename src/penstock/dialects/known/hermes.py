"""Hermes: JSON between <tool_call> tags, as Qwen 2.5 and 3, MiMo, Reka, canary and many others write it; Baidu Ernie 4.5 has a
response tag around the answer. LongCat and InternLM 2 and 3 have other tags."""

from penstock.dialects.description import THINK, Block, Dialect, Json, Reasoning, Written

WRITTEN = Written('<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>', separator="\n")
BLOCKS = (Block("<tool_call>", Json(), "</tool_call>"),)

DIALECTS = (
    Dialect("hermes", BLOCKS, WRITTEN, THINK, aliases=("qwen", "qwen25", "qwen3_json", "canary"),
            reasoning_names=("qwen3", "reka", "mimo"), signs=(("<tool_call>",),), rank=10),
    Dialect("scratch_pad", BLOCKS, WRITTEN, Reasoning(("<scratch_pad>",), ("</scratch_pad>",)),
            signs=(("<tool_call>", "<scratch_pad>"),), rank=11),
    Dialect("ernie45", BLOCKS, WRITTEN, Reasoning(("<think>",), ("</think>",), implicit=True),
            ("<response>\n", "<response>", "\n</response>", "</response>"), reasoning_names=("ernie45",),
            signs=(("<tool_call>", "<response>"),), rank=30),
    Dialect("longcat", (Block("<longcat_tool_call>", Json(), "</longcat_tool_call>"),),
            Written('<longcat_tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</longcat_tool_call>',
                    separator="\n"),
            Reasoning(("<longcat_think>",), ("</longcat_think>",)), signs=(("<longcat_tool_call>",),), rank=60),
    Dialect("internlm", (Block("<|action_start|>", Json(), "<|action_end|>", ("<|plugin|>",)),),
            Written('<|action_start|><|plugin|>\n{{"name": "{name}", "parameters": {arguments}}}<|action_end|>'), THINK,
            aliases=("internlm2",), reasoning_names=("internlm", "intern_s1"), parallel=False, signs=(("<|action_start|>",),),
            rank=50),
    Dialect("rwkv", reasoning=THINK, reasoning_names=("rwkv",)),
)
