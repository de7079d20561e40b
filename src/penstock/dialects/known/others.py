"""Dialects with forms of their own: Apertus, Functionary 3.1 and 3.2, GigaChat 3, MiniCPM 5, gpt-oss and MiroThinker."""

from penstock.dialects.description import THINK, Block, Dialect, Json, Named, Reasoning, Tags, Written

MCP = Named(("<tool_name>",), ("</tool_name>\n<arguments>", "</tool_name><arguments>"),
            header=("<server_name>", "</server_name>"))
DIALECTS = (
    Dialect("apertus", (Block("<|tools_prefix|>", Json(keyed=True), "<|tools_suffix|>"),),
            Written('{{"{name}": {arguments}}}', "<|tools_prefix|>[", ", ", "]<|tools_suffix|>"),
            Reasoning(("<|inner_prefix|>",), ("<|inner_suffix|>",)), reasoning_names=("apertus",),
            signs=(("<|tools_prefix|>",),), rank=60, trims=True),
    Dialect("functionary_v3.1", (Block("<function=", Named((), (">",)), "</function>"),),
            Written("<function={name}>{arguments}</function>"), signs=(("<function=", "<|python_tag|>"),), rank=36),
    # Every message names its recipient; the prompt's end begins the first one.
    Dialect("functionary_v3.2", (Block(">>>", Named((), ("\n",))),), Written(">>>{name}\n{arguments}"), hidden=(">>>all\n",),
            lead=">>>", signs=((">>>all", "recipient"),), rank=48),
    Dialect("gigachat3", (Block("<|function_call|>", Json()), Block("function call<|role_sep|>\n", Json())),
            Written('<|function_call|>{{"name": "{name}", "arguments": {arguments}}}'), parallel=False,
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
)
