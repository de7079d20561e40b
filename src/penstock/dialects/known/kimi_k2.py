"""Kimi: K2 with a section of calls whose ids hold the names, K3 with channels, and typed arguments in elements."""

from penstock.dialects.description import THINK, Block, Dialect, Named, Reasoning, Tags, Written

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
FORM = Named((), ("<|tool_call_argument_begin|>",), id_is_name=True)
DIALECTS = (
    Dialect("kimi_k2", (Block(BEGIN, FORM, END, ("<|tool_call_begin|>", "<|tool_call_end|>")),
                        Block("<|tool_call_section_begin|>", FORM, "<|tool_call_section_end|>",
                              ("<|tool_call_begin|>", "<|tool_call_end|>"))),
            Written("<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
                    BEGIN, "", END),
            THINK, reasoning_names=("kimi_k2",), signs=((BEGIN,),), rank=60),
    Dialect("kimi_k3", (Block("<|open|>tools<|sep|>", Tags(('<|open|>call tool="', '"'),
                                                           ('<|open|>argument key="', '"<|sep|>'),
                                                           ("", "<|close|>argument<|sep|>"), "<|close|>call<|sep|>",
                                                           trim=False, typed='" type="', rest="<|sep|>"),
                              "<|close|>tools<|sep|>"),),
            Written('<|open|>call tool="{name}" index="{index}"<|sep|>{arguments}<|close|>call<|sep|>', "<|open|>tools<|sep|>",
                    "", "<|close|>tools<|sep|>",
                    '<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'),
            Reasoning(("<|open|>think<|sep|>",), ("<|close|>think<|sep|>",), call_ends=True),
            ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"), reasoning_names=("kimi_k3",),
            signs=(("<|open|>", "<|close|>", "<|sep|>"),), rank=60),
)
