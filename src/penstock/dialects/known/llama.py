"""Llama 3.x as JSON, bare or behind <|python_tag|>, and Llama 3.2 and 4 and ToolACE as Python calls."""

from penstock.dialects.description import Block, Dialect, Json, Python, Written

JSON = Json(needs_arguments=True)
DIALECTS = (
    Dialect("llama3_json", (Block("<|python_tag|>", JSON), Block("{", JSON, keep=True, bare=True)),
            Written('{{"name": "{name}", "parameters": {arguments}}}', separator="; "),
            aliases=("llama4_json", "llama3", "llama"),
            signs=(("<|python_tag|>",), ('"parameters": ', "<|start_header_id|>"), ('"parameters": ', "<|header_start|>")),
            rank=20),
    Dialect("llama4_pythonic", (Block("<|python_start|>", Python(), "<|python_end|>"),
                                Block("[", Python(), first=True, bare=True)),
            Written("{name}({arguments})", "<|python_start|>[", ", ", "]<|python_end|>", "{key}={value}", ", "),
            signs=(("<|header_start|>", "func_name1("), ("<|header_start|>", "<|python_start|>")), rank=30),
    Dialect("pythonic", (Block("[", Python(), first=True, bare=True),),
            Written("{name}({arguments})", "[", ", ", "]", "{key}={value}", ", "), aliases=("toolace",),
            signs=(("[func_name1(",),), rank=25),
)
