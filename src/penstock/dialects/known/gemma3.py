"""Gemma 3 has no format of its own; its model card has it write Python calls or JSON in a fence."""

from penstock.dialects.description import Block, Dialect, Json, Python, Written

FENCES = ("```tool_code", "```tool_call", "```json")
DIALECTS = (
    Dialect("gemma3", (Block(FENCES[0], Python(), "```", bare=True), Block(FENCES[1], Json(needs_arguments=True), "```",
                                                                           bare=True),
                       Block(FENCES[2], Json(needs_arguments=True), "```", bare=True),
                       Block("[", Python(), first=True, bare=True), Block("{", Json(needs_arguments=True), first=True,
                                                                          keep=True, bare=True)),
            Written("{name}({arguments})", "[", ", ", "]", "{key}={value}", ", "), signs=(("<start_of_turn>",),), rank=1),
)
