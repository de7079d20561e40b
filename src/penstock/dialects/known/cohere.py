"""Cohere Command R7B and A: a list of JSON between action markers; Command R+ in a fence behind Action:."""

from penstock.dialects.description import Block, Dialect, Json, Reasoning, Written

REASONING = Reasoning(("<|START_THINKING|>",), ("<|END_THINKING|>",), call_ends=True)
HIDDEN = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
CITING = (("<co>", ""), ("</co: ", ">"), ("<co: ", ">"))
DIALECTS = (
    Dialect("cohere_command", (Block("<|START_ACTION|>", Json(), "<|END_ACTION|>"),),
            Written('{{"tool_call_id": "{index}", "tool_name": "{name}", "parameters": {arguments}}}',
                    "<|START_ACTION|>[\n    ", ",\n    ", "\n]<|END_ACTION|>"),
            REASONING, HIDDEN, citing=CITING, aliases=("cohere", "cohere_command3", "cohere_command4"),
            reasoning_names=("cohere_command3", "cohere_command4", "cohere"), signs=(("<|START_ACTION|>",),), rank=60),
    Dialect("command_r_plus", tuple(Block(f"Action:{gap}```json", Json(), "```") for gap in ("\n", " ", "")),
            Written('    {{\n        "tool_name": "{name}",\n        "parameters": {arguments}\n    }}', "Action: ```json\n[\n",
                    ",\n", "\n]```"), signs=(("Action:", "directly-answer"),), rank=58),
)
