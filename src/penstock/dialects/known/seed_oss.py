"""ByteDance Seed-OSS: Qwen3-Coder's tags between markers of its own."""

from penstock.dialects.description import Block, Dialect, Reasoning, Tags, Written

TAGS = Tags(("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), "</function>")
DIALECTS = (
    Dialect("seed_oss", (Block("<seed:tool_call>", TAGS, "</seed:tool_call>"),),
            Written("<seed:tool_call>\n<function={name}>\n{arguments}</function>\n</seed:tool_call>", separator="\n",
                    parameter="<parameter={key}>{value}</parameter>\n"),
            Reasoning(("<seed:think>",), ("</seed:think>",)), reasoning_names=("seed_oss",), signs=(("<seed:tool_call>",),),
            rank=60),
)
