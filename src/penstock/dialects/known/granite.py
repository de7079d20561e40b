"""IBM Granite: 3 with a list behind <|tool_call|>, 4 with Hermes' tags, the 20B function caller with <function_call>."""

from penstock.dialects.description import Block, Dialect, Json, Reasoning, Written

REASONING = Reasoning(("Here is my thought process:", "Here's my thought process:"),
                      ("Here is my response:", "Here's my response:"))
ITEM = '{{"name": "{name}", "arguments": {arguments}}}'
DIALECTS = (
    Dialect("granite", (Block("<|tool_call|>", Json()), Block("<tool_call>", Json(), "</tool_call>"),
                        Block("[", Json(), first=True, bare=True)),
            Written(ITEM, "<|tool_call|>[", ", ", "]"), REASONING,
            ("<response>", "</response>"), reasoning_names=("granite",),
            signs=(("<|start_of_role|>", "<|tool_call|>"),), rank=50),
    Dialect("granite4", (Block("<tool_call>", Json(), "</tool_call>"),),
            Written("<tool_call>\n" + ITEM + "\n</tool_call>", separator="\n"),
            Reasoning(("<think>",), ("</think>",)), reasoning_names=("granite_thinking_parser",),
            signs=(("<|start_of_role|>", "<tool_call>"),), rank=49),
    Dialect("granite-20b-fc", (Block("<function_call>", Json()),), Written("<function_call> " + ITEM, separator=" "),
            signs=(("<|function_call_library|>",),), rank=48),
)
