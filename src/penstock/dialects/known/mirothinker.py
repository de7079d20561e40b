"""MiroThinker: tools of MCP servers, of which a call names one."""

from penstock.dialects.description import THINK, Block, Dialect, Named, Written

FORM = Named(("<tool_name>",), ("</tool_name>\n<arguments>", "</tool_name><arguments>"),
             header=("<server_name>", "</server_name>"))
DIALECTS = (
    Dialect("mirothinker", (Block("<use_mcp_tool>", FORM, "</use_mcp_tool>", ("</arguments>",)),),
            Written("<server_name>default</server_name>\n<tool_name>{name}</tool_name>\n<arguments>\n{arguments}\n</arguments>\n",
                    "<use_mcp_tool>\n", "", "</use_mcp_tool>"),
            THINK, signs=(("<use_mcp_tool>", "<server_name>"),), rank=60),
)
