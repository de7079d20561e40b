"""StepFun Step 3: invoke tags between DeepSeek's kind of markers."""

from penstock.dialects.description import THINK_OPEN, Block, Dialect, Tags, Written

TAGS = Tags(('<steptml:invoke name="', '">'), ('<steptml:parameter name="', '">'), ("", "</steptml:parameter>"),
            "</steptml:invoke>")
DIALECTS = (
    Dialect("step3", (Block("<｜tool_calls_begin｜>", TAGS, "<｜tool_calls_end｜>",
                            ("<｜tool_call_begin｜>", "<｜tool_call_end｜>", "function<｜tool_sep｜>", "<｜tool_sep｜>")),),
            Written('<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">{arguments}'
                    "</steptml:invoke><｜tool_call_end｜>",
                    "<｜tool_calls_begin｜>", "", "<｜tool_calls_end｜>",
                    '<steptml:parameter name="{key}">{value}</steptml:parameter>'),
            THINK_OPEN, reasoning_names=("step3",), signs=(("<｜tool_calls_begin｜>",),), rank=60),
)
