"""Mistral: [TOOL_CALLS] and a list of JSON, and since 2024's end a name and its arguments for each call."""

from penstock.dialects.description import Block, Dialect, Json, Named, Reasoning, Written

REASONING = Reasoning(("[THINK]",), ("[/THINK]",))
OLD, NEW = Block("[TOOL_CALLS]", Json()), Block("[TOOL_CALLS]", Named(between=("[ARGS]",), id_between="[CALL_ID]"))
DIALECTS = (
    Dialect("mistral", (OLD, NEW), Written("[TOOL_CALLS]{name}[ARGS]{arguments}"), REASONING, ids="mistral",
            reasoning_names=("mistral",), signs=(("[TOOL_CALLS]", "[ARGS]"),), rank=50),
    Dialect("mistral_v3", (OLD, NEW), Written('{{"name": "{name}", "arguments": {arguments}}}', "[TOOL_CALLS] [", ", ", "]"),
            REASONING, ids="mistral", signs=(("[TOOL_CALLS]",),), rank=45),
)
