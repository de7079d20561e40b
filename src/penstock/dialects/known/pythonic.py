"""Python calls: Liquid LFM2 between markers, OLMo 3 on lines between tags, SmolLM3 in <code> tags beside Hermes' tags, and
Gemma 3, which has no format of its own and writes them or JSON in a fence, as its model card says."""

from penstock.dialects.description import THINK, THINK_OPEN, Block, Dialect, Json, Python, Written

JSON = Json(needs_arguments=True)
DIALECTS = (
    Dialect("gemma3", (Block("```tool_code", Python(), "```", bare=True), Block("```tool_call", JSON, "```", bare=True),
                       Block("```json", JSON, "```", bare=True), Block("[", Python(), first=True, bare=True),
                       Block("{", JSON, first=True, keep=True, bare=True)),
            Written("{name}({arguments})", "[", ", ", "]", "{key}={value}", ", "), signs=(("<start_of_turn>",),), rank=1),
    Dialect("lfm2", tuple(Block("<|tool_call_start|>", form, "<|tool_call_end|>") for form in (Python(), Json())),
            Written("{name}({arguments})", "<|tool_call_start|>[", ", ", "]<|tool_call_end|>", "{key}={value}", ", "), THINK,
            signs=(("<|tool_call_start|>",), ("<|tool_list_start|>",), ("List of tools: [",)), rank=50),
    Dialect("olmo3", (Block("<function_calls>", Python(), "</function_calls>"),),
            Written("{name}({arguments})", "<function_calls>", "\n", "</function_calls>", "{key}={value}", ", "), THINK_OPEN,
            reasoning_names=("olmo3",), signs=(("<function_calls>", "<functions>"),), rank=35),
    Dialect("smollm3", (Block("<tool_call>", Json(), "</tool_call>"), Block("<code>", Python(), "</code>", bare=True)),
            Written('<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>', separator="\n"), THINK,
            signs=(("SmolLM", "<tool_call>"), ("SmolLM",)), rank=30),
)
