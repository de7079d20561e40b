"""OLMo 3: Python calls on lines between <function_calls> tags."""

from penstock.dialects.description import THINK_OPEN, Block, Dialect, Python, Written

DIALECTS = (
    Dialect("olmo3", (Block("<function_calls>", Python(), "</function_calls>"),),
            Written("{name}({arguments})", "<function_calls>", "\n", "</function_calls>", "{key}={value}", ", "), THINK_OPEN,
            reasoning_names=("olmo3",), signs=(("<function_calls>", "<functions>"),), rank=35),
)
