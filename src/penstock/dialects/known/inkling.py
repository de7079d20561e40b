"""Inkling: messages of one kind of content each, called by tokens."""

from penstock.dialects.description import Block, Dialect, Json, Reasoning, Written

MODEL, THINKING, CALL = "<|message_model|>", "<|content_thinking|>", "<|content_invoke_tool_json|>"
END, LAST = "<|end_message|>", "<|content_model_end_sampling|>"
DIALECTS = (
    Dialect("inkling", (Block(CALL, Json(("name",), ("args", "arguments", "parameters")), END),),
            Written(f'{MODEL}{{name}}{CALL}{{{{"name":"{{name}}","args":{{arguments}}}}}}{END}'),
            Reasoning((THINKING, MODEL + THINKING), (END, LAST), call_ends=True),
            ("<|content_text|>", "<|content_invoke_tool_text|>", "<|content_tool_error|>", END, LAST), MODEL,
            reasoning_names=("inkling",), signs=((THINKING, MODEL),), lead=MODEL, rank=60),
)
