"""DeepSeek: V3 and R1 with fenced JSON, V3.1 with bare JSON, V3.2 and V4 with tags."""

from penstock.dialects.description import THINK, THINK_OPEN, Block, Dialect, Named, Tags, Written

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
V3 = Block(BEGIN, Named(("function" + SEP,), ("\n```json\n", "\n```json", "\n")), END, (CALL, CALL_END, "```"))
V31 = Block(BEGIN, Named((), (SEP,)), END, (CALL, CALL_END))


TAGS = Tags(('<｜DSML｜invoke name="', '">'), ('<｜DSML｜parameter name="', ">"), ("", "</｜DSML｜parameter>"),
            "</｜DSML｜invoke>", trim=False, typed='" string=')


def _tags(block: str) -> tuple[Block, Block]:
    """A block, and its calls alone: at the end of a long context a model may leave its beginning out."""
    end = f"</｜DSML｜{block}>"
    return Block(f"<｜DSML｜{block}>", TAGS, end), Block(TAGS.name[0], TAGS, end, keep=True)


def _written(block: str) -> Written:
    return Written('<｜DSML｜invoke name="{name}">\n{arguments}</｜DSML｜invoke>\n', f"<｜DSML｜{block}>\n", "",
                   f"</｜DSML｜{block}>",
                   '<｜DSML｜parameter name="{key}" string="{string}">{value}</｜DSML｜parameter>\n')


DIALECTS = (
    Dialect("deepseek_v3", (V3,), Written(CALL + "function" + SEP + "{name}\n```json\n{arguments}\n```" + CALL_END, BEGIN,
                                          "\n", END),
            THINK_OPEN, aliases=("deepseekv3", "deepseek_r1"), reasoning_names=("deepseek_r1", "deepseekr1", "holo2", "step5"),
            signs=((BEGIN, "```json"),), rank=52),
    Dialect("deepseek_v31", (V31,), Written(CALL + "{name}" + SEP + "{arguments}" + CALL_END, BEGIN, "", END), THINK,
            aliases=("deepseekv31",), reasoning_names=("deepseek_v3", "deepseek_v31"), signs=((BEGIN,),), rank=51),
    Dialect("deepseek_v32", _tags("function_calls"), _written("function_calls"), THINK, aliases=("deepseekv32",),
            reasoning_names=("deepseek_v32",), signs=(("function_calls>", "DSML"),), rank=55),
    Dialect("deepseek_v4", _tags("tool_calls"), _written("tool_calls"), THINK, aliases=("deepseekv4",),
            reasoning_names=("deepseek_v4",), signs=(("tool_calls>", "DSML"),), rank=56),
)
