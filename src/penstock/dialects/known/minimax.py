"""MiniMax: M1 with lines of JSON, M2 with invoke tags."""

from penstock.dialects.description import THINK, THINK_OPEN, Block, Dialect, Json, Tags, Written

DIALECTS = (
    Dialect("minimax", (Block("<tool_calls>", Json(), "</tool_calls>"),),
            Written('{{"name": "{name}", "arguments": {arguments}}}', "<tool_calls>\n", "\n", "\n</tool_calls>"), THINK,
            aliases=("minimax_m1",), reasoning_names=("minimax_m1",), signs=(("<tool_calls>", "<beginning_of_sentence>"),),
            rank=40),
    Dialect("minimax_m2", (Block("<minimax:tool_call>", Tags(('<invoke name="', '">'), ('<parameter name="', '">'),
                                 ("", "</parameter>"), "</invoke>"), "</minimax:tool_call>"),),
            Written('<invoke name="{name}">\n{arguments}</invoke>\n', "<minimax:tool_call>\n", "", "</minimax:tool_call>",
                    '<parameter name="{key}">{value}</parameter>\n'),
            THINK_OPEN, reasoning_names=("minimax_m2", "minimax_m2_append_think"), signs=(("<minimax:tool_call>",),), rank=60),
)
