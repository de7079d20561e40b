"""Solar Open 2: a name on the line of the call's token, and arguments between tokens."""

from penstock.dialects.description import Block, Dialect, Reasoning, Tags, Written

BEGIN, END = "<|tool_call:start|>", "<|tool_call:end|>"
DIALECTS = (
    Dialect("solar_open2", (Block(BEGIN, Tags((BEGIN, ""), ("<|tool_arg:start|>", "<|tool_arg:value|>"),
                                              ("", "<|tool_arg:end|>"), END, trim=False), keep=True),),
            Written(f"{BEGIN}{{name}}\n{{arguments}}{END}", separator="\n",
                    parameter="<|tool_arg:start|>{key}<|tool_arg:value|>{value}<|tool_arg:end|>\n"),
            Reasoning(("<|think:start|>",), ("<|think:end|>",), implicit=True, call_ends=True),
            reasoning_names=("solar_open2",), signs=((BEGIN,),), rank=60),
)
