"""Kimi K2: a section of calls whose ids hold the names."""

from penstock.dialects.description import THINK, Block, Dialect, Named, Written

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
FORM = Named((), ("<|tool_call_argument_begin|>",), id_is_name=True)
DIALECTS = (
    Dialect("kimi_k2", (Block(BEGIN, FORM, END, ("<|tool_call_begin|>", "<|tool_call_end|>")),
                        Block("<|tool_call_section_begin|>", FORM, "<|tool_call_section_end|>",
                              ("<|tool_call_begin|>", "<|tool_call_end|>"))),
            Written("<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
                    BEGIN, "", END),
            THINK, reasoning_names=("kimi_k2",), signs=((BEGIN,),), rank=60),
)
