"""InternLM 2 and 3: a plugin action."""

from penstock.dialects.description import THINK, Block, Dialect, Json, Written

DIALECTS = (
    Dialect("internlm", (Block("<|action_start|>", Json(), "<|action_end|>", ("<|plugin|>",)),),
            Written('<|action_start|><|plugin|>\n{{"name": "{name}", "parameters": {arguments}}}<|action_end|>'), THINK,
            aliases=("internlm2",), reasoning_names=("internlm", "intern_s1"), parallel=False, signs=(("<|action_start|>",),),
            rank=50),
)
