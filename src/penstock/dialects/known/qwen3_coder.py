"""Qwen3-Coder and Qwen 3.5, Nemotron 3 and Step 3.5: a function tag with parameter tags."""

from penstock.dialects.description import THINK, Block, Dialect, Tags, Written

TAGS = Tags(("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), "</function>")
WRITTEN = Written("<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>", separator="\n",
                  parameter="<parameter={key}>\n{value}\n</parameter>\n")
BLOCKS = (Block("<tool_call>", TAGS, "</tool_call>"), Block("<function=", TAGS, keep=True))
DIALECTS = (
    Dialect("qwen3_coder", BLOCKS, WRITTEN, THINK,
            aliases=("qwen3_xml", "qwen3coder", "step3p5", "mimo", "mimo_v2"), reasoning_names=("step3p5", "nemotron_v3"),
            signs=(("<function=", "<parameter="),), rank=40),
)
