"""GLM 4.5 to 5, Poolside's models and Hunyuan 3: a name, and keys and values in tags."""

from msgspec.structs import replace

from penstock.dialects.description import THINK, Block, Dialect, Tags, Written

TAGS = Tags(("", ""), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), untyped="json")
REASONING = THINK
HIDDEN = ("<|begin_of_box|>", "<|end_of_box|>")
DIALECTS = (
    Dialect("glm45", (Block("<tool_call>", TAGS, "</tool_call>"),),
            Written("<tool_call>{name}\n{arguments}</tool_call>", separator="\n",
                    parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"), REASONING, HIDDEN,
            reasoning_names=("glm45",), trims=True, signs=(("<arg_key>", "<tool_call>{function-name}\n"),), rank=46),
    Dialect("glm47", (Block("<tool_call>", TAGS, "</tool_call>"),),
            Written("<tool_call>{name}{arguments}</tool_call>",
                    parameter="<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"),
            REASONING, HIDDEN, reasoning_names=("glm47",), signs=(("<arg_key>",),), rank=45, trims=True),
    Dialect("poolside_v1", (Block("<tool_call>", replace(TAGS, trim=False), "</tool_call>"),),
            Written("<tool_call>{name}\n{arguments}</tool_call>", separator="\n",
                    parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"),
            REASONING, reasoning_names=("poolside_v1",)),
    Dialect("hy_v3", (Block("<tool_calls>", replace(TAGS, name=("<tool_call>", "<tool_sep>"), end="</tool_call>"),
                            "</tool_calls>"),),
            Written("<tool_call>{name}<tool_sep>\n{arguments}</tool_call>\n", "<tool_calls>\n", tail="</tool_calls>",
                    parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"),
            REASONING, reasoning_names=("hy_v3",), signs=(("<arg_key>", "<tool_sep>"),), rank=50),
)
