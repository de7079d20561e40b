"""SmolLM3: Hermes' tags, or Python calls in <code> tags."""

from penstock.dialects.description import THINK, Block, Dialect, Json, Python, Written

DIALECTS = (
    Dialect("smollm3", (Block("<tool_call>", Json(), "</tool_call>"), Block("<code>", Python(), "</code>", bare=True)),
            Written('<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>', separator="\n"), THINK,
            signs=(("SmolLM", "<tool_call>"), ("SmolLM",)), rank=30),
)
