"""FunctionGemma and Gemma 4: call:name{...} with quotes of their own, and Gemma 4's thought channel."""

from penstock.dialects.description import Block, Dialect, Named, Reasoning, Written

DIALECTS = (
    Dialect("functiongemma", (Block("<start_function_call>", Named(("call:",), quote="<escape>"), "<end_function_call>"),),
            Written("<start_function_call>call:{name}{{{arguments}}}<end_function_call>", parameter="{key}:{value}",
                    joiner=","),
            signs=(("<start_function_call>",),), rank=60, trims=True),
    Dialect("gemma4", (Block("<|tool_call>", Named(("call:", ":"), quote='<|"|>'), "<tool_call|>"),),
            Written("<|tool_call>call:{name}{{{arguments}}}<tool_call|>", parameter="{key}:{value}", joiner=","),
            Reasoning(("<|channel>thought", "<|channel>"), ("<channel|>",), call_ends=True), ("<|tool_response>", "<turn|>"),
            aliases=("gemma",), reasoning_names=("gemma4", "gemma"), signs=(("<|tool_call>",),), rank=60, trims=True),
)
