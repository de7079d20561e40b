"""The dialects that Penstock knows, by name. A new one is one more row, most often a known form with other markers.

The order counts: of dialects of one rank, and of those whose reasoning ends by the same marker, the first is chosen."""

from msgspec.structs import replace

from penstock.dialects.description import THINK, THINK_OPEN, Block, Dialect, Json, Named, Python, Reasoning, Tags, Written

ITEM = '{{"name": "{name}", "arguments": {arguments}}}'
SURE = Json(needs_arguments=True)
CALLS = (Block("<tool_calls>", Json(), "</tool_calls>"),)
CALLS_WRITTEN = Written(ITEM, "<tool_calls>[", ", ", "]</tool_calls>")
HERMES = (Block("<tool_call>", Json(), "</tool_call>"),)
HERMES_WRITTEN = Written(f"<tool_call>\n{ITEM}\n</tool_call>", separator="\n")
CLOSED = Reasoning(("<think>",), ("</think>",))
FUNCTION = Tags(("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), "</function>")

V3_BEGIN, V3_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
V3_CALL, V3_CALL_END, V3_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
DSML = Tags(('<｜DSML｜invoke name="', '">'), ('<｜DSML｜parameter name="', ">"), ("", "</｜DSML｜parameter>"),
            "</｜DSML｜invoke>", trim=False, typed='" string=')
GLM = Tags(("", ""), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), untyped="json")
GLM_WRITTEN = Written("<tool_call>{name}\n{arguments}</tool_call>", separator="\n",
                      parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n")
GLM_HIDDEN = ("<|begin_of_box|>", "<|end_of_box|>")
INKLING, INKLING_THINKING, INKLING_CALL = "<|message_model|>", "<|content_thinking|>", "<|content_invoke_tool_json|>"
INKLING_END, INKLING_LAST = "<|end_message|>", "<|content_model_end_sampling|>"
K2_BEGIN, K2_END, K2_INNER = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
                              ("<|tool_call_begin|>", "<|tool_call_end|>"))
K2 = Named((), ("<|tool_call_argument_begin|>",), id_is_name=True)
M3 = "]<]minimax[>["
MISTRAL = Block("[TOOL_CALLS]", Json()), Block("[TOOL_CALLS]", Named(between=("[ARGS]",), id_between="[CALL_ID]"))
MISTRAL_REASONING = Reasoning(("[THINK]",), ("[/THINK]",))
MCP = Named(("<tool_name>",), ("</tool_name>\n<arguments>", "</tool_name><arguments>"),
            header=("<server_name>", "</server_name>"))
STEP = Tags(('<steptml:invoke name="', '">'), ('<steptml:parameter name="', '">'), ("", "</steptml:parameter>"),
            "</steptml:invoke>")
SOLAR_BEGIN, SOLAR_END = "<|tool_call:start|>", "<|tool_call:end|>"
SOLAR = Tags((SOLAR_BEGIN, ""), ("<|tool_arg:start|>", "<|tool_arg:value|>"), ("", "<|tool_arg:end|>"), SOLAR_END, trim=False)


def _dsml(block: str) -> tuple[tuple[Block, Block], Written]:
    """A block, its calls alone (at the end of a long context a model may leave its beginning out), and what writes them."""
    begin, end = f"<｜DSML｜{block}>", f"</｜DSML｜{block}>"
    written = Written('<｜DSML｜invoke name="{name}">\n{arguments}</｜DSML｜invoke>\n', f"{begin}\n", "", end,
                      '<｜DSML｜parameter name="{key}" string="{string}">{value}</｜DSML｜parameter>\n')
    return (Block(begin, DSML, end), Block(DSML.name[0], DSML, end, keep=True)), written


DIALECTS = {dialect.name: dialect for dialect in (
    # Cohere Command R7B and A: a list of JSON between action markers; Command R+ in a fence behind Action:.
    Dialect("cohere_command", (Block("<|START_ACTION|>", Json(), "<|END_ACTION|>"),),
            Written('{{"tool_call_id": "{index}", "tool_name": "{name}", "parameters": {arguments}}}',
                    "<|START_ACTION|>[\n    ", ",\n    ", "\n]<|END_ACTION|>"),
            Reasoning(("<|START_THINKING|>",), ("<|END_THINKING|>",), call_ends=True),
            ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
            citing=(("<co>", ""), ("</co: ", ">"), ("<co: ", ">")), aliases=("cohere", "cohere_command3", "cohere_command4"),
            reasoning_names=("cohere_command3", "cohere_command4", "cohere"), signs=(("<|START_ACTION|>",),), rank=60),
    Dialect("command_r_plus", tuple(Block(f"Action:{gap}```json", Json(), "```") for gap in ("\n", " ", "")),
            Written('    {{\n        "tool_name": "{name}",\n        "parameters": {arguments}\n    }}', "Action: ```json\n[\n",
                    ",\n", "\n]```"), signs=(("Action:", "directly-answer"),), rank=58),
    # DeepSeek: V3 and R1 with fenced JSON, V3.1 with bare JSON, V3.2 and V4 with tags.
    Dialect("deepseek_v3", (Block(V3_BEGIN, Named(("function" + V3_SEP,), ("\n```json\n", "\n```json", "\n")), V3_END,
                                  (V3_CALL, V3_CALL_END, "```")),),
            Written(f"{V3_CALL}function{V3_SEP}{{name}}\n```json\n{{arguments}}\n```{V3_CALL_END}", V3_BEGIN, "\n", V3_END),
            THINK_OPEN, aliases=("deepseekv3", "deepseek_r1"), reasoning_names=("deepseek_r1", "deepseekr1", "holo2", "step5"),
            signs=((V3_BEGIN, "```json"),), rank=52),
    Dialect("deepseek_v31", (Block(V3_BEGIN, Named((), (V3_SEP,)), V3_END, (V3_CALL, V3_CALL_END)),),
            Written(f"{V3_CALL}{{name}}{V3_SEP}{{arguments}}{V3_CALL_END}", V3_BEGIN, "", V3_END), THINK,
            aliases=("deepseekv31",), signs=((V3_BEGIN,),), rank=51),
    Dialect("deepseek_v32", *_dsml("function_calls"), THINK, aliases=("deepseekv32",), signs=(("function_calls>", "DSML"),),
            rank=55),
    Dialect("deepseek_v4", *_dsml("tool_calls"), THINK, aliases=("deepseekv4",), signs=(("tool_calls>", "DSML"),), rank=56),
    # FunctionGemma and Gemma 4: call:name{...} with quotes of their own, and Gemma 4's thought channel.
    Dialect("functiongemma", (Block("<start_function_call>", Named(("call:",), quote="<escape>"), "<end_function_call>"),),
            Written("<start_function_call>call:{name}{{{arguments}}}<end_function_call>", parameter="{key}:{value}",
                    joiner=","),
            signs=(("<start_function_call>",),), rank=60, trims=True),
    Dialect("gemma4", (Block("<|tool_call>", Named(("call:", ":"), quote='<|"|>'), "<tool_call|>"),),
            Written("<|tool_call>call:{name}{{{arguments}}}<tool_call|>", parameter="{key}:{value}", joiner=","),
            Reasoning(("<|channel>thought", "<|channel>"), ("<channel|>",), call_ends=True), ("<|tool_response>", "<turn|>"),
            aliases=("gemma",), reasoning_names=("gemma",), signs=(("<|tool_call>",),), rank=60, trims=True),
    # GLM 4.5 to 5, Poolside's models and Hunyuan 3: a name, and keys and values in tags.
    Dialect("glm45", (Block("<tool_call>", GLM, "</tool_call>"),), GLM_WRITTEN, THINK, GLM_HIDDEN, trims=True,
            signs=(("<arg_key>", "<tool_call>{function-name}\n"),), rank=46),
    Dialect("glm47", (Block("<tool_call>", GLM, "</tool_call>"),),
            Written("<tool_call>{name}{arguments}</tool_call>",
                    parameter="<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"),
            THINK, GLM_HIDDEN, signs=(("<arg_key>",),), rank=45, trims=True),
    Dialect("poolside_v1", (Block("<tool_call>", replace(GLM, trim=False), "</tool_call>"),), GLM_WRITTEN, THINK),
    Dialect("hy_v3", (Block("<tool_calls>", replace(GLM, name=("<tool_call>", "<tool_sep>"), end="</tool_call>"),
                            "</tool_calls>"),),
            Written("<tool_call>{name}<tool_sep>\n{arguments}</tool_call>\n", "<tool_calls>\n", tail="</tool_calls>",
                    parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"),
            THINK, signs=(("<arg_key>", "<tool_sep>"),), rank=50),
    # IBM Granite: 3 with a list behind <|tool_call|>, 4 with Hermes' tags, the 20B function caller with <function_call>.
    Dialect("granite", (Block("<|tool_call|>", Json()), *HERMES, Block("[", Json(), first=True, bare=True)),
            Written(ITEM, "<|tool_call|>[", ", ", "]"), Reasoning(("Here is my thought process:", "Here's my thought process:"),
                                                           ("Here is my response:", "Here's my response:")),
            ("<response>", "</response>"), signs=(("<|start_of_role|>", "<|tool_call|>"),), rank=50),
    Dialect("granite4", HERMES, HERMES_WRITTEN, CLOSED, reasoning_names=("granite_thinking_parser",),
            signs=(("<|start_of_role|>", "<tool_call>"),), rank=49),
    Dialect("granite-20b-fc", (Block("<function_call>", Json()),), Written("<function_call> " + ITEM, separator=" "),
            signs=(("<|function_call_library|>",),), rank=48),
    # Hermes: JSON between <tool_call> tags, as Qwen 2.5 and 3, MiMo, Reka, canary and many others write it; Baidu Ernie 4.5 has
    # a response tag around the answer. LongCat and InternLM 2 and 3 have other tags.
    Dialect("hermes", HERMES, HERMES_WRITTEN, THINK, aliases=("qwen", "qwen25", "qwen3_json", "canary"),
            reasoning_names=("qwen3", "reka", "mimo"), signs=(("<tool_call>",),), rank=10),
    Dialect("scratch_pad", HERMES, HERMES_WRITTEN, Reasoning(("<scratch_pad>",), ("</scratch_pad>",)),
            signs=(("<tool_call>", "<scratch_pad>"),), rank=11),
    Dialect("ernie45", HERMES, HERMES_WRITTEN, Reasoning(("<think>",), ("</think>",), implicit=True),
            ("<response>\n", "<response>", "\n</response>", "</response>"), signs=(("<tool_call>", "<response>"),), rank=30),
    Dialect("longcat", (Block("<longcat_tool_call>", Json(), "</longcat_tool_call>"),),
            Written(f"<longcat_tool_call>\n{ITEM}\n</longcat_tool_call>", separator="\n"),
            Reasoning(("<longcat_think>",), ("</longcat_think>",)), signs=(("<longcat_tool_call>",),), rank=60),
    Dialect("internlm", (Block("<|action_start|>", Json(), "<|action_end|>", ("<|plugin|>",)),),
            Written('<|action_start|><|plugin|>\n{{"name": "{name}", "parameters": {arguments}}}<|action_end|>'), THINK,
            aliases=("internlm2",), reasoning_names=("intern_s1",), parallel=False, signs=(("<|action_start|>",),), rank=50),
    Dialect("rwkv", reasoning=THINK),
    # Inkling: messages of one kind of content each, called by tokens.
    Dialect("inkling", (Block(INKLING_CALL, Json(("name",), ("args", "arguments", "parameters")), INKLING_END),),
            Written(f'{INKLING}{{name}}{INKLING_CALL}{{{{"name":"{{name}}","args":{{arguments}}}}}}{INKLING_END}'),
            Reasoning((INKLING_THINKING, INKLING + INKLING_THINKING), (INKLING_END, INKLING_LAST), call_ends=True),
            ("<|content_text|>", "<|content_invoke_tool_text|>", "<|content_tool_error|>", INKLING_END, INKLING_LAST), INKLING,
            signs=((INKLING_THINKING, INKLING),), lead=INKLING, rank=60),
    # Kimi: K2 with a section of calls whose ids hold the names, K3 with channels, and typed arguments in elements.
    Dialect("kimi_k2", (Block(K2_BEGIN, K2, K2_END, K2_INNER),
                        Block("<|tool_call_section_begin|>", K2, "<|tool_call_section_end|>", K2_INNER)),
            Written("<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
                    K2_BEGIN, "", K2_END), THINK, signs=((K2_BEGIN,),), rank=60),
    Dialect("kimi_k3", (Block("<|open|>tools<|sep|>", Tags(('<|open|>call tool="', '"'),
                                                           ('<|open|>argument key="', '"<|sep|>'),
                                                           ("", "<|close|>argument<|sep|>"), "<|close|>call<|sep|>",
                                                           trim=False, typed='" type="', rest="<|sep|>"),
                              "<|close|>tools<|sep|>"),),
            Written('<|open|>call tool="{name}" index="{index}"<|sep|>{arguments}<|close|>call<|sep|>', "<|open|>tools<|sep|>",
                    "", "<|close|>tools<|sep|>",
                    '<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'),
            Reasoning(("<|open|>think<|sep|>",), ("<|close|>think<|sep|>",), call_ends=True),
            ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
            signs=(("<|open|>", "<|close|>", "<|sep|>"),), rank=60),
    # A list of JSON between markers: Hunyuan A13B, Apriel, AI21 Jamba, NVIDIA Nemotron Nano 2 (Nemotron 3 writes Qwen3-Coder's
    # tags), Phi-4 mini, Firefunction, and Salesforce xLAM, which may also write it bare or in a fence.
    Dialect("hunyuan_a13b", CALLS, CALLS_WRITTEN, CLOSED, ("<answer>\n", "<answer>", "\n</answer>", "</answer>"),
            signs=(("<tool_calls>[", "<answer>"), ("<tool_calls>[", "<|extra_")), rank=42),
    Dialect("apriel", CALLS, CALLS_WRITTEN, Reasoning(("<thinking>",), ("</thinking>",)),
            ("[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"),
            signs=(("<tool_calls>[", "<thinking>"), ("<tool_calls>[",)), rank=41),
    Dialect("jamba", CALLS, Written(ITEM, "<tool_calls>[\n    ", ",\n    ", "\n]</tool_calls>"), signs=(("<tool_calls>",),),
            rank=20),
    Dialect("nemotron_json", (Block("<TOOLCALL>", Json(), "</TOOLCALL>"),),
            Written(ITEM, "<TOOLCALL>[", ", ", "]</TOOLCALL>"), THINK, aliases=("nemotron_nano_v2", "nemotron"),
            reasoning_names=("nemotron",), signs=(("<TOOLCALL>",),), rank=50),
    Dialect("phi4_mini_json", (Block("functools", Json()), Block("<|tool_call|>", Json(), "<|/tool_call|>"),
                               Block("{", SURE, keep=True, first=True, bare=True)),
            Written(ITEM, "functools[", ", ", "]"), aliases=("firefunction",),
            signs=(("functools",), ("<|tool_call|>", "<|/tool_call|>")), rank=44),
    Dialect("xlam", (Block("[TOOL_CALLS]", SURE), Block("<tool_call>", SURE, "</tool_call>"),
                     Block("```json", SURE, "```", bare=True), Block("[", SURE, bare=True)),
            Written(ITEM, "[", ", ", "]"), THINK,
            signs=(('[{"name": "tool_call_name"',), ('"name": "tool_call_name"',)), rank=47, trims=True),
    # Llama 3.x as JSON, bare or behind <|python_tag|>, and Llama 3.2 and 4 and ToolACE as Python calls.
    Dialect("llama3_json", (Block("<|python_tag|>", SURE), Block("{", SURE, keep=True, bare=True)),
            Written('{{"name": "{name}", "parameters": {arguments}}}', separator="; "),
            aliases=("llama4_json", "llama3", "llama"),
            signs=(("<|python_tag|>",), ('"parameters": ', "<|start_header_id|>"), ('"parameters": ', "<|header_start|>")),
            rank=20),
    Dialect("llama4_pythonic", (Block("<|python_start|>", Python(), "<|python_end|>"),
                                Block("[", Python(), first=True, bare=True)),
            Written("{name}({arguments})", "<|python_start|>[", ", ", "]<|python_end|>", "{key}={value}", ", "),
            signs=(("<|header_start|>", "func_name1("), ("<|header_start|>", "<|python_start|>")), rank=30),
    Dialect("pythonic", (Block("[", Python(), first=True, bare=True),),
            Written("{name}({arguments})", "[", ", ", "]", "{key}={value}", ", "), aliases=("toolace",),
            signs=(("[func_name1(",),), rank=25),
    # MiniMax: M1 with lines of JSON, M2 with invoke tags, M3 with a token before each tag and parameters as elements.
    Dialect("minimax", CALLS, Written(ITEM, "<tool_calls>\n", "\n", "\n</tool_calls>"), THINK,
            aliases=("minimax_m1",), reasoning_names=("minimax_m1",), signs=(("<tool_calls>", "<beginning_of_sentence>"),),
            rank=40),
    Dialect("minimax_m2", (Block("<minimax:tool_call>", Tags(('<invoke name="', '">'), ('<parameter name="', '">'),
                                 ("", "</parameter>"), "</invoke>", trim=False), "</minimax:tool_call>"),),
            Written('<invoke name="{name}">\n{arguments}</invoke>\n', "<minimax:tool_call>\n", "", "</minimax:tool_call>",
                    '<parameter name="{key}">{value}</parameter>\n'),
            THINK_OPEN, reasoning_names=("minimax_m2_append_think",), signs=(("<minimax:tool_call>",),), rank=60),
    Dialect("minimax_m3", (Block(f"{M3}<tool_call>",
                                 Tags((f'{M3}<invoke name="', '">'), (f"{M3}<", ">"), ("", f"{M3}</{{key}}>"), f"{M3}</invoke>",
                                      trim=False, untyped="json", nested=M3), f"{M3}</tool_call>"),),
            Written(f'{M3}<invoke name="{{name}}">{{arguments}}{M3}</invoke>\n', f"{M3}<tool_call>\n", "", f"{M3}</tool_call>",
                    f"{M3}<{{key}}>{{value}}{M3}</{{key}}>"),
            Reasoning(("<mm:think>",), ("</mm:think>",), call_ends=True), signs=((M3,),), rank=61),
    # Mistral: [TOOL_CALLS] and a list of JSON, and since 2024's end a name and its arguments for each call.
    Dialect("mistral", MISTRAL, Written("[TOOL_CALLS]{name}[ARGS]{arguments}"), MISTRAL_REASONING, ids="mistral",
            signs=(("[TOOL_CALLS]", "[ARGS]"),), rank=50),
    Dialect("mistral_v3", MISTRAL, Written(ITEM, "[TOOL_CALLS] [", ", ", "]"), MISTRAL_REASONING,
            ids="mistral", signs=(("[TOOL_CALLS]",),), rank=45),
    # Dialects with forms of their own: Apertus, Functionary 3.1 and 3.2, GigaChat 3, MiniCPM 5, gpt-oss and MiroThinker.
    Dialect("apertus", (Block("<|tools_prefix|>", Json(keyed=True), "<|tools_suffix|>"),),
            Written('{{"{name}": {arguments}}}', "<|tools_prefix|>[", ", ", "]<|tools_suffix|>"),
            Reasoning(("<|inner_prefix|>",), ("<|inner_suffix|>",)), signs=(("<|tools_prefix|>",),), rank=60, trims=True),
    Dialect("functionary_v3.1", (Block("<function=", Named((), (">",)), "</function>"),),
            Written("<function={name}>{arguments}</function>"), signs=(("<function=", "<|python_tag|>"),), rank=36),
    # Every message names its recipient; the prompt's end begins the first one.
    Dialect("functionary_v3.2", (Block(">>>", Named((), ("\n",))),), Written(">>>{name}\n{arguments}"), hidden=(">>>all\n",),
            lead=">>>", signs=((">>>all", "recipient"),), rank=48),
    Dialect("gigachat3", (Block("<|function_call|>", Json()), Block("function call<|role_sep|>\n", Json())),
            Written("<|function_call|>" + ITEM), parallel=False,
            hidden=("<|message_sep|>\n\n", "<|message_sep|>"),
            signs=(("<|function_call|>",), ("function call", "<|role_sep|>"), ("gigachat",)), rank=60),
    Dialect("minicpm5", (Block('<function name="', Tags(('<function name="', '">'), ('<param name="', '">'), ("", "</param>"),
                                                        "</function>", literal=("<![CDATA[", "]]>")), keep=True),),
            Written('<function name="{name}">{arguments}</function>', separator="\n",
                    parameter='<param name="{key}">{value}</param>'), THINK, signs=(('<function name="', '<param name="'),),
            rank=48),
    # A call names one of several MCP servers.
    Dialect("mirothinker", (Block("<use_mcp_tool>", MCP, "</use_mcp_tool>", ("</arguments>",)),),
            Written("<server_name>default</server_name>\n<tool_name>{name}</tool_name>\n<arguments>\n{arguments}\n</arguments>\n",
                    "<use_mcp_tool>\n", "", "</use_mcp_tool>"),
            THINK, signs=(("<use_mcp_tool>", "<server_name>"),), rank=60),
    Dialect("openai", written=Written("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"),
            harmony=True, parallel=False, aliases=("harmony", "gpt_oss", "gpt-oss"),
            reasoning_names=("openai_gptoss", "GptOss"), signs=(("<|channel|>", "<|message|>"),), rank=70),
    # Python calls: Liquid LFM2 between markers, OLMo 3 on lines between tags, SmolLM3 in <code> tags beside Hermes' tags, and
    # Gemma 3, which has no format of its own and writes them or JSON in a fence, as its model card says.
    Dialect("gemma3", (Block("```tool_code", Python(), "```", bare=True), Block("```tool_call", SURE, "```", bare=True),
                       Block("```json", SURE, "```", bare=True), Block("[", Python(), first=True, bare=True),
                       Block("{", SURE, first=True, keep=True, bare=True)),
            Written("{name}({arguments})", "[", ", ", "]", "{key}={value}", ", "), signs=(("<start_of_turn>",),), rank=1),
    Dialect("lfm2", tuple(Block("<|tool_call_start|>", form, "<|tool_call_end|>") for form in (Python(), Json())),
            Written("{name}({arguments})", "<|tool_call_start|>[", ", ", "]<|tool_call_end|>", "{key}={value}", ", "), THINK,
            signs=(("<|tool_call_start|>",), ("<|tool_list_start|>",), ("List of tools: [",)), rank=50),
    Dialect("olmo3", (Block("<function_calls>", Python(), "</function_calls>"),),
            Written("{name}({arguments})", "<function_calls>", "\n", "</function_calls>", "{key}={value}", ", "), THINK_OPEN,
            signs=(("<function_calls>", "<functions>"),), rank=35),
    Dialect("smollm3", (*HERMES, Block("<code>", Python(), "</code>", bare=True)), HERMES_WRITTEN, THINK,
            signs=(("SmolLM", "<tool_call>"), ("SmolLM",)), rank=30),
    # A tag for the function, and tags for its parameters: Qwen3-Coder, Qwen 3.5, Nemotron 3 and Step 3.5, ByteDance Seed-OSS
    # between markers of its own, StepFun Step 3 between DeepSeek's kind of markers, and Solar Open 2 with tokens for tags.
    Dialect("qwen3_coder", (Block("<tool_call>", FUNCTION, "</tool_call>"), Block("<function=", FUNCTION, keep=True)),
            Written("<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>", separator="\n",
                    parameter="<parameter={key}>\n{value}\n</parameter>\n"), THINK,
            aliases=("qwen3_xml", "qwen3coder", "step3p5", "mimo", "mimo_v2"), reasoning_names=("step3p5", "nemotron_v3"),
            signs=(("<function=", "<parameter="),), rank=40),
    Dialect("seed_oss", (Block("<seed:tool_call>", FUNCTION, "</seed:tool_call>"),),
            Written("<seed:tool_call>\n<function={name}>\n{arguments}</function>\n</seed:tool_call>", separator="\n",
                    parameter="<parameter={key}>{value}</parameter>\n"),
            Reasoning(("<seed:think>",), ("</seed:think>",)), signs=(("<seed:tool_call>",),), rank=60),
    Dialect("solar_open2", (Block(SOLAR_BEGIN, SOLAR, keep=True),),
            Written(f"{SOLAR_BEGIN}{{name}}\n{{arguments}}{SOLAR_END}", separator="\n",
                    parameter="<|tool_arg:start|>{key}<|tool_arg:value|>{value}<|tool_arg:end|>\n"),
            Reasoning(("<|think:start|>",), ("<|think:end|>",), implicit=True, call_ends=True),
            signs=((SOLAR_BEGIN,),), rank=60),
    Dialect("step3", (Block("<｜tool_calls_begin｜>", STEP, "<｜tool_calls_end｜>",
                            ("<｜tool_call_begin｜>", "<｜tool_call_end｜>", "function<｜tool_sep｜>", "<｜tool_sep｜>")),),
            Written('<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">{arguments}'
                    "</steptml:invoke><｜tool_call_end｜>", "<｜tool_calls_begin｜>", "", "<｜tool_calls_end｜>",
                    '<steptml:parameter name="{key}">{value}</steptml:parameter>'),
            THINK_OPEN, signs=(("<｜tool_calls_begin｜>",),), rank=60))}
