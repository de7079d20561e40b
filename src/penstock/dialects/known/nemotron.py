"""NVIDIA Nemotron Nano 2: a list of JSON between <TOOLCALL> tags. Nemotron 3 writes Qwen3-Coder's tags."""

from penstock.dialects.description import THINK, Block, Dialect, Json, Written

DIALECTS = (
    Dialect("nemotron_json", (Block("<TOOLCALL>", Json(), "</TOOLCALL>"),),
            Written('{{"name": "{name}", "arguments": {arguments}}}', "<TOOLCALL>[", ", ", "]</TOOLCALL>"), THINK,
            aliases=("nemotron_nano_v2", "nemotron"), reasoning_names=("nemotron",), signs=(("<TOOLCALL>",),), rank=50),
)
