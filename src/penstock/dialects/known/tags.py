"""A tag for the function, and tags for its parameters: Qwen3-Coder, Qwen 3.5, Nemotron 3 and Step 3.5, ByteDance Seed-OSS
between markers of its own, StepFun Step 3 between DeepSeek's kind of markers, and Solar Open 2 with tokens for tags."""

from penstock.dialects.description import THINK, THINK_OPEN, Block, Dialect, Reasoning, Tags, Written

TAGS = Tags(("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), "</function>")
STEP = Tags(('<steptml:invoke name="', '">'), ('<steptml:parameter name="', '">'), ("", "</steptml:parameter>"),
            "</steptml:invoke>")
BEGIN, END = "<|tool_call:start|>", "<|tool_call:end|>"
SOLAR = Tags((BEGIN, ""), ("<|tool_arg:start|>", "<|tool_arg:value|>"), ("", "<|tool_arg:end|>"), END, trim=False)
DIALECTS = (
    Dialect("qwen3_coder", (Block("<tool_call>", TAGS, "</tool_call>"), Block("<function=", TAGS, keep=True)),
            Written("<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>", separator="\n",
                    parameter="<parameter={key}>\n{value}\n</parameter>\n"), THINK,
            aliases=("qwen3_xml", "qwen3coder", "step3p5", "mimo", "mimo_v2"), reasoning_names=("step3p5", "nemotron_v3"),
            signs=(("<function=", "<parameter="),), rank=40),
    Dialect("seed_oss", (Block("<seed:tool_call>", TAGS, "</seed:tool_call>"),),
            Written("<seed:tool_call>\n<function={name}>\n{arguments}</function>\n</seed:tool_call>", separator="\n",
                    parameter="<parameter={key}>{value}</parameter>\n"),
            Reasoning(("<seed:think>",), ("</seed:think>",)), reasoning_names=("seed_oss",), signs=(("<seed:tool_call>",),),
            rank=60),
    Dialect("solar_open2", (Block(BEGIN, SOLAR, keep=True),),
            Written(f"{BEGIN}{{name}}\n{{arguments}}{END}", separator="\n",
                    parameter="<|tool_arg:start|>{key}<|tool_arg:value|>{value}<|tool_arg:end|>\n"),
            Reasoning(("<|think:start|>",), ("<|think:end|>",), implicit=True, call_ends=True),
            reasoning_names=("solar_open2",), signs=((BEGIN,),), rank=60),
    Dialect("step3", (Block("<｜tool_calls_begin｜>", STEP, "<｜tool_calls_end｜>",
                            ("<｜tool_call_begin｜>", "<｜tool_call_end｜>", "function<｜tool_sep｜>", "<｜tool_sep｜>")),),
            Written('<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">{arguments}'
                    "</steptml:invoke><｜tool_call_end｜>", "<｜tool_calls_begin｜>", "", "<｜tool_calls_end｜>",
                    '<steptml:parameter name="{key}">{value}</steptml:parameter>'),
            THINK_OPEN, reasoning_names=("step3",), signs=(("<｜tool_calls_begin｜>",),), rank=60),
)
