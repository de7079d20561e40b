"""MiniMax: M1 with lines of JSON, M2 with invoke tags, M3 with a token before each tag and parameters as elements."""

from penstock.dialects.description import THINK, THINK_OPEN, Block, Dialect, Json, Reasoning, Tags, Written

NS = "]<]minimax[>["
DIALECTS = (
    Dialect("minimax", (Block("<tool_calls>", Json(), "</tool_calls>"),),
            Written('{{"name": "{name}", "arguments": {arguments}}}', "<tool_calls>\n", "\n", "\n</tool_calls>"), THINK,
            aliases=("minimax_m1",), reasoning_names=("minimax_m1",), signs=(("<tool_calls>", "<beginning_of_sentence>"),),
            rank=40),
    Dialect("minimax_m2", (Block("<minimax:tool_call>", Tags(('<invoke name="', '">'), ('<parameter name="', '">'),
                                 ("", "</parameter>"), "</invoke>", trim=False), "</minimax:tool_call>"),),
            Written('<invoke name="{name}">\n{arguments}</invoke>\n', "<minimax:tool_call>\n", "", "</minimax:tool_call>",
                    '<parameter name="{key}">{value}</parameter>\n'),
            THINK_OPEN, reasoning_names=("minimax_m2", "minimax_m2_append_think"), signs=(("<minimax:tool_call>",),), rank=60),
    Dialect("minimax_m3", (Block(f"{NS}<tool_call>", Tags((f'{NS}<invoke name="', '">'), (f"{NS}<", ">"),
                                                          ("", f"{NS}</{{key}}>"), f"{NS}</invoke>", trim=False,
                                                          untyped="json", nested=NS), f"{NS}</tool_call>"),),
            Written(f'{NS}<invoke name="{{name}}">{{arguments}}{NS}</invoke>\n', f"{NS}<tool_call>\n", "", f"{NS}</tool_call>",
                    f"{NS}<{{key}}>{{value}}{NS}</{{key}}>"),
            Reasoning(("<mm:think>",), ("</mm:think>",), call_ends=True), reasoning_names=("minimax_m3",),
            signs=((NS,),), rank=61),
)
