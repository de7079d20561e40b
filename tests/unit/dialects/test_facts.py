"""Answers as models write them, in shapes that vLLM's parser tests (tests/tool_use, tests/entrypoints/openai/tool_parsers,
tests/reasoning) hold to be calls, reasoning or text; said again with other names and values. Each is read whole, letter by
letter, and cut at every place."""
# ruff: noqa: E501 (tables of answers, which read best on one line each)

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.dialects.choice import by_name, reasoning_by_name
from penstock.dialects.description import Dialect
from penstock.dialects.message import Message
from penstock.dialects.parser import Parser

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {
    key: {"type": kind} for key, kind in properties.items()}}}} for name, properties in {
        "weather": {"city": "string", "unit": "string"}, "add": {"a": "number", "b": "number"}, "now": {},
        "area": {"shape": "string", "sides": "object", "digits": "integer", "exact": "boolean", "rate": "float"},
        "user": {"name": "string", "age": "integer", "home": "object", "role": "string", "ok": "boolean", "tags": "array"}}.items()]
ROME: dict[str, Any] = {"city": "Rome", "unit": "C"}
OSLO: dict[str, Any] = {"city": "Oslo", "unit": "C"}
ANN: dict[str, Any] = {"name": "Ann B", "age": 37, "home": {"city": "Oslo", "zip": "01"}, "role": None, "ok": True,
                       "tags": ["x", "y"]}
ADDED: dict[str, Any] = {"a": 3.5, "b": 4}
J_ROME, J_OSLO, J_ADDED = (json.dumps(value) for value in (ROME, OSLO, ADDED))
W_ROME, W_OSLO = (f'{{"name": "weather", "arguments": {arguments}}}' for arguments in (J_ROME, J_OSLO))
PY_ANN = "user(name='Ann B', age=37, home={'city': 'Oslo', 'zip': '01'}, role=None, ok=True, tags=['x', 'y'])"
XML = "<function=weather>\n<parameter=city>\n{}\n</parameter>\n<parameter=unit>\nC\n</parameter>\n</function>"
GLM = "<tool_call>weather\n    <arg_key>city</arg_key>\n    <arg_value>{}</arg_value>\n    <arg_key>unit</arg_key>\n" \
      "    <arg_value>C</arg_value>\n    </tool_call>"
SEED = "<seed:tool_call>\n" + XML + "\n</seed:tool_call>"
KIMI, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL = "<|tool_call_begin|>functions.{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
DS, DS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DS_CALL = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
DSML = '<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">{}</｜DSML｜parameter>\n' \
       '<｜DSML｜parameter name="unit" string="true">C</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
NS = "]<]minimax[>["
LFM, LFM_END = "<|tool_call_start|>", "<|tool_call_end|>"
M2 = '<invoke name="weather">\n<parameter name="city">{}</parameter>\n<parameter name="unit">C</parameter>\n</invoke>\n'

Calls = list[tuple[str, dict[str, Any]]]

FACTS: list[tuple[str, str, str, Calls]] = [
    # (vLLM's name of the parser, answer, content, calls)
    *((name, "What can I do for you?", "What can I do for you?", []) for name in (
        "hermes", "pythonic", "llama3_json", "llama4_pythonic", "mistral", "jamba", "xlam", "hunyuan_a13b", "kimi_k2", "minimax",
        "minimax_m2", "glm45", "qwen3_coder", "seed_oss", "ernie45", "step3", "olmo3", "deepseek_v3", "deepseek_v31",
        "phi4_mini_json", "internlm", "granite", "granite-20b-fc", "longcat", "functiongemma", "gigachat3")),
    # JSON between tags
    ("hermes", f"<tool_call>\n{W_ROME}\n</tool_call>", "", [("weather", ROME)]),
    ("hermes", f"Sure.\n<tool_call>{W_ROME}</tool_call>\n<tool_call>{W_OSLO}</tool_call>", "Sure.", [("weather", ROME), ("weather", OSLO)]),
    ("hermes", f"<tool_call>\n{W_ROME}", "", [("weather", ROME)]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}</tool_call>', "", [("now", {})]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "5MW 参数 \\"x\\" {y}", "unit": "</tool_cal"}}</tool_call>', "",
     [("weather", {"city": '5MW 参数 "x" {y}', "unit": "</tool_cal"})]),
    ("longcat", f"<longcat_tool_call>\n{W_ROME}\n</longcat_tool_call>", "", [("weather", ROME)]),
    ("ernie45", f"<tool_call>\n{W_ROME}\n</tool_call>\n<tool_call>\n{W_OSLO}\n</tool_call>\n", "", [("weather", ROME), ("weather", OSLO)]),
    ("granite4", f"<tool_call>{W_ROME}</tool_call>", "", [("weather", ROME)]),
    ("granite-20b-fc", f"<function_call> {W_ROME} <function_call> {W_OSLO}", "", [("weather", ROME), ("weather", OSLO)]),
    ("gigachat3", f"Let me see.<|function_call|>{W_ROME}", "Let me see.", [("weather", ROME)]),
    # lists of JSON
    ("jamba", f" <tool_calls>[\n    {W_ROME}\n]</tool_calls>", "", [("weather", ROME)]),
    ("jamba", f" Let me call it.<tool_calls>[\n    {W_ROME},\n    {W_OSLO}\n]</tool_calls>", " Let me call it.",
     [("weather", ROME), ("weather", OSLO)]),
    ("hunyuan_a13b", f"I call it. <tool_calls>[{W_ROME}]</tool_calls>", "I call it. ", [("weather", ROME)]),
    ("hunyuan_a13b", f"<tool_calls>[{W_ROME}]</tool_calls>\n</answer>", "", [("weather", ROME)]),
    ("hunyuan_a13b", '<tool_calls>[{"name": "area", "arguments": {"sides": {"a": {"b": {"c": 1}}}}}]</tool_calls>', "",
     [("area", {"sides": {"a": {"b": {"c": 1}}}})]),
    ("granite", f"<|tool_call|> [{W_ROME}, {W_OSLO}]", "", [("weather", ROME), ("weather", OSLO)]),
    ("granite", f"<tool_call>[{W_ROME}]", "", [("weather", ROME)]),
    ("phi4_mini_json", W_ROME, "", [("weather", ROME)]),
    ("phi4_mini_json", f"functools[{W_ROME}, {W_OSLO}]", "", [("weather", ROME), ("weather", OSLO)]),
    ("xlam", f"[{W_ROME}, {W_OSLO}]", "", [("weather", ROME), ("weather", OSLO)]),
    ("xlam", f"<think>Let me see.</think>[{W_ROME}]", "", [("weather", ROME)]),
    ("xlam", f"I help.\n```json\n[{W_ROME}]\n```", "I help.", [("weather", ROME)]),
    ("xlam", f"I look.[TOOL_CALLS][{W_ROME}]", "I look.", [("weather", ROME)]),
    ("xlam", f"I look.<tool_call>[{W_ROME}]</tool_call>", "I look.", [("weather", ROME)]),
    ("mistral", f'[TOOL_CALLS][{{"name": "add", "arguments":{J_ADDED}}}]', "", [("add", ADDED)]),
    ("mistral", f'[TOOL_CALLS]  [ {{"name":"add" , "arguments" : {J_ADDED} }} ]', "", [("add", ADDED)]),
    ("mistral", f'[TOOL_CALLS] [{{"arguments":{J_ROME}, "name": "weather"}}]', "", [("weather", ROME)]),
    ("mistral", '[TOOL_CALLS] [{"arguments":{"name": "Ann"}, "name": "user"}]', "", [("user", {"name": "Ann"})]),
    ("mistral", f"[TOOL_CALLS]add{J_ADDED}", "", [("add", ADDED)]),
    ("mistral", f"[TOOL_CALLS]add{J_ADDED}[TOOL_CALLS]weather{J_ROME}", "", [("add", ADDED), ("weather", ROME)]),
    ("mistral", f"Right.[TOOL_CALLS]add[ARGS]{J_ADDED}", "Right.", [("add", ADDED)]),
    ("minimax", f"<tool_calls>\n{W_ROME}\n{W_OSLO}\n</tool_calls>", "", [("weather", ROME), ("weather", OSLO)]),
    ("minimax", f"I look. <tool_calls>\n{W_ROME}", "I look. ", [("weather", ROME)]),
    ("internlm", f'I look.<|action_start|><|plugin|>\n{{"name": "weather", "parameters": {J_ROME}}}<|action_end|>', "I look.",
     [("weather", ROME)]),
    # bare JSON
    ("llama3_json", f'{{"name": "weather", "parameters": {J_ROME}}}', "", [("weather", ROME)]),
    ("llama3_json", f'{{"name": "weather", "arguments": {J_ROME}}}', "", [("weather", ROME)]),
    ("llama3_json", f'<|python_tag|>{{"name": "weather", "parameters": {J_ROME}}}', "", [("weather", ROME)]),
    ("llama3_json", '{"name": "now", "parameters": {}} ; {"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}', "",
     [("now", {}), ("add", {"a": 1}), ("now", {})]),
    ("llama3_json", 'It is {"name": "now", "parameters": {}} Shall I go on?', "It is  Shall I go on?", [("now", {})]),
    ("llama3_json", '{"name": "area", "parameters": {"shape": "a {b} [c]", "sides": {"in": "x {y}"}}}', "",
     [("area", {"shape": "a {b} [c]", "sides": {"in": "x {y}"}})]),
    ("llama3_json", '{"name": "weather", "parameters": {not json}', '{"name": "weather", "parameters": {not json}', []),
    # Python
    ("pythonic", "[weather(city='Rome', unit='C')]", "", [("weather", ROME)]),
    ("pythonic", f"[{PY_ANN}]", "", [("user", ANN)]),
    ("pythonic", "[now()]", "", [("now", {})]),
    ("pythonic", "[weather(city=Rome, unit=C)]", "", [("weather", ROME)]),
    ("pythonic", "[weather(city=Rome, Italy, unit=7), now()]", "", [("weather", {"city": "Rome, Italy", "unit": "7"}), ("now", {})]),
    ("functionary_v3.2", f">>>all\nLet me see.>>>weather\n{J_ROME}>>>now\n{{}}", "Let me see.", [("weather", ROME), ("now", {})]),
    ("poolside_v1", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>  Rome\n</arg_value>\n</tool_call>", "",
     [("weather", {"city": "  Rome\n"})]),
    ("poolside_v1", "<tool_call>add<arg_key>a</arg_key><arg_value> 3.5 </arg_value></tool_call>", "", [("add", {"a": 3.5})]),
    ("hy_v3", "I look.<tool_calls>\n<tool_call>now<tool_sep>\n</tool_call>\n</tool_calls>", "I look.", [("now", {})]),
    ("hy_v3", "<tool_calls><tool_call>weather<tool_sep><arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>unit</arg_key>"
     "<arg_value>C</arg_value></tool_call></tool_calls>", "", [("weather", ROME)]),
    ("minicpm5", 'Before.\n<function name="weather"><param name="city">Rome</param><param name="unit">C</param></function>', "Before.\n",
     [("weather", ROME)]),
    ("minicpm5", '<function name="now"></function>', "", [("now", {})]),
    ("minicpm5", '<function name="weather"><param name="city"><![CDATA[a </param>\n b]]></param><param name="unit"><![CDATA[]]></param></function>', "",
     [("weather", {"city": "a </param>\n b", "unit": ""})]),
    ("minicpm5", '<function name="add"><param name="a"><![CDATA[3.5]]></param></function>', "", [("add", {"a": 3.5})]),
    ("functionary_v3.2", ">>>all\nNothing to call.", "Nothing to call.", []),
    ("pythonic", "[area(sides={})]", "", [("area", {"sides": {}})]),
    ("pythonic", "[user(tags=[])]", "", [("user", {"tags": []})]),
    ("pythonic", r"""[weather(city='Ann\'s Bay', unit='\"C\"')]""", "", [("weather", {"city": "Ann's Bay", "unit": '"C"'})]),
    ("pythonic", f"[weather(city='Rome', unit='C'), {PY_ANN}]", "", [("weather", ROME), ("user", ANN)]),
    ("pythonic", "hello [A(A=\t)A(A=,\t)A(A=,\t", "hello [A(A=\t)A(A=,\t)A(A=,\t", []),
    ("llama4_pythonic", "[weather(city='Rome',unit='C'),now()]", "", [("weather", ROME), ("now", {})]),
    ("llama4_pythonic", "<|python_start|>[weather(city='Rome', unit='C'), add(a=9)]", "", [("weather", ROME), ("add", {"a": 9})]),
    ("llama4_pythonic", f"<|python_start|>[{PY_ANN}]<|python_end|>", "", [("user", ANN)]),
    ("olmo3", f"<function_calls>weather(city='Rome', unit='C')\n{PY_ANN}</function_calls>", "", [("weather", ROME), ("user", ANN)]),
    ("olmo3", "<function_calls>weather(city=\"Rome\", unit=\"C\")</function_calls>", "", [("weather", ROME)]),
    ("olmo3", "<function_calls>user(ok=true, role=null)</function_calls>", "", [("user", {"ok": True, "role": None})]),
    # tags
    ("qwen3_coder", f"Sure!<tool_call>\n{XML.format('Rome')}\n</tool_call>\n<tool_call>\n{XML.format('Oslo')}\n</tool_call>", "Sure!",
     [("weather", ROME), ("weather", OSLO)]),
    ("qwen3_coder", XML.format("Rome"), "", [("weather", ROME)]),
    ("qwen3_coder", "<tool_call>\n<function=area>\n<parameter=shape>\nbox\n</parameter>\n<parameter=sides>\n{\"a\": 10, \n \"b\": 2}\n"
     "</parameter>\n<parameter=digits>\n2\n</parameter>\n<parameter=exact>\ntrue\n</parameter>\n<parameter=rate>\n3.5\n</parameter>\n"
     "</function>\n</tool_call>", "",
     [("area", {"shape": "box", "sides": {"a": 10, "b": 2}, "digits": 2, "exact": True, "rate": 3.5})]),
    ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n<parameter=unit>\nC\n</function>\n</tool_call>", "",
     [("weather", ROME)]),
    ("qwen3_xml", "<tool_call>\n<function=weather><parameter=city>Rome</parameter><parameter=unit>C</parameter></function>\n</tool_call>",
     "", [("weather", ROME)]),
    ("seed_oss", f"I look.\n{SEED.format('Rome')}", "I look.", [("weather", ROME)]),
    ("glm45", GLM.format("Rome") + "\n    " + GLM.format("Oslo"), "", [("weather", ROME), ("weather", OSLO)]),
    ("glm45", "I look. " + GLM.format("Rome"), "I look. ", [("weather", ROME)]),
    ("glm45", "<tool_call>now\n</tool_call>", "", [("now", {})]),
    ("glm45", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>",
     "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>", []),
    ("glm47", "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>unit</arg_key><arg_value>C</arg_value>"
     "</tool_call>", "", [("weather", ROME)]),
    ("minimax_m2", f"<minimax:tool_call>\n{M2.format('Rome')}{M2.format('Oslo')}</minimax:tool_call>", "",
     [("weather", ROME), ("weather", OSLO)]),
    ("deepseek_v32", f"<｜DSML｜function_calls>\n{DSML.format('Rome')}{DSML.format('Oslo')}</｜DSML｜function_calls>", "",
     [("weather", ROME), ("weather", OSLO)]),
    ("step3", '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="weather"><steptml:parameter '
     'name="city">Rome</steptml:parameter><steptml:parameter name="unit">C</steptml:parameter></steptml:invoke><｜tool_call_end｜>'
     "<｜tool_calls_end｜>", "", [("weather", ROME)]),
    ("minimax_m3", f"I look.\n{NS}<tool_call>\n{NS}<invoke name=\"weather\">{NS}<city>Rome{NS}</city>{NS}<unit>C{NS}</unit>{NS}</invoke>\n"
     f"{NS}<invoke name=\"now\">{NS}</invoke>\n{NS}</tool_call>", "I look.\n", [("weather", ROME), ("now", {})]),
    ("minimax_m3", f"{NS}<tool_call>\n{NS}<invoke name=\"user\">\n{NS}<name>Ann <b>B</b>{NS}</name>\n{NS}<age>37{NS}</age>\n{NS}<home>"
     f"{NS}<city>Oslo{NS}</city>{NS}<rooms>{NS}<item>{NS}<size>7{NS}</size>{NS}</item>{NS}<item>9{NS}</item>{NS}</rooms>{NS}</home>\n"
     f"{NS}<ok>true{NS}</ok>\n{NS}<tags>{NS}<item>x{NS}</item>{NS}<item>y{NS}</item>{NS}</tags>{NS}</invoke>\n{NS}</tool_call>", "",
     [("user", {"name": "Ann <b>B</b>", "age": 37, "home": {"city": "Oslo", "rooms": [{"size": 7}, 9]}, "ok": True, "tags": ["x", "y"]})]),
    ("minimax_m3", f"{NS}<tool_call>{NS}<invoke name=\"user\">{NS}<tags>{NS}</tags>{NS}<age>{NS}<item>{NS}</age>{NS}</invoke>{NS}</tool_call>", "",
     [("user", {"tags": [], "age": f"{NS}<item>"})]),
    ("kimi_k3", "<|open|>response<|sep|>I look.<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool=\"weather\" index=\"1\"<|sep|>"
     "<|open|>argument key=\"city\" type=\"string\"<|sep|>Rome<|close|>argument<|sep|><|open|>argument key=\"unit\" type=\"string\"<|sep|>C"
     "<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool=\"add\" index=\"2\"<|sep|><|open|>argument key=\"a\" type=\"number\""
     "<|sep|>3.5<|close|>argument<|sep|><|open|>argument key=\"b\" type=\"object\"<|sep|>{\"c\": [1]}<|close|>argument<|sep|><|close|>call<|sep|>"
     "<|close|>tools<|sep|><|close|>message<|sep|>", "I look.", [("weather", ROME), ("add", {"a": 3.5, "b": {"c": [1]}})]),
    ("kimi_k3", "<|open|>response<|sep|>Nothing to call.<|close|>response<|sep|><|close|>message<|sep|>", "Nothing to call.", []),
    ("solar_open2", "I look.\n<|tool_call:start|>weather\n<|tool_arg:start|>city<|tool_arg:value|>Rome<|tool_arg:end|>\n<|tool_arg:start|>unit"
     "<|tool_arg:value|>C<|tool_arg:end|>\n<|tool_call:end|>\n<|tool_call:start|>now\n<|tool_call:end|>", "I look.\n",
     [("weather", ROME), ("now", {})]),
    ("solar_open2", "<|tool_call:start|>add\n<|tool_arg:start|>a<|tool_arg:value|>3.5<|tool_arg:end|>\n<|tool_call:end|>", "", [("add", {"a": 3.5})]),
    ("inkling", f"<|message_model|><|content_text|>I look.<|end_message|><|message_model|>weather<|content_invoke_tool_json|>"
     f'{{"name":"weather","args":{J_ROME}}}<|end_message|><|message_model|><|content_invoke_tool_json|>{{"name":"now","args":{{}}}}'
     "<|content_model_end_sampling|>", "I look.", [("weather", ROME), ("now", {})]),
    ("inkling", "<|message_model|><|content_text|>Nothing.<|end_message|><|content_model_end_sampling|>", "Nothing.", []),
    ("mirothinker", f"I look.\n<use_mcp_tool>\n<server_name>tool-python</server_name>\n<tool_name>weather</tool_name>\n<arguments>\n{J_ROME}\n"
     "</arguments>\n</use_mcp_tool>", "I look.\n", [("weather", ROME)]),
    ("mirothinker", f"<use_mcp_tool>\n<server_name>a</server_name>\n<tool_name>weather</tool_name>\n<arguments>\n{J_ROME}\n</arguments>\n"
     "<server_name>b</server_name>\n<tool_name>now</tool_name>\n<arguments>{}</arguments>\n</use_mcp_tool>", "",
     [("weather", ROME), ("now", {})]),
    # names beside arguments
    ("kimi_k2", f"I look. {KIMI} <|tool_call_begin|>\nfunctions.weather:0 <|tool_call_argument_begin|> {J_ROME} <|tool_call_end|> {KIMI_END}",
     "I look. ", [("weather", ROME)]),
    ("kimi_k2", f"{KIMI}{KIMI_CALL.format('weather:0', J_ROME)}{KIMI_CALL.format('add:1', J_ADDED)}{KIMI_END}", "",
     [("weather", ROME), ("add", ADDED)]),
    ("kimi_k2", f"{KIMI}{KIMI_CALL.format('weather:0', json.dumps(ROME, indent=2))}{KIMI_END}", "", [("weather", ROME)]),
    ("kimi_k2", KIMI + KIMI_CALL.format("weather:0", '{"city": "<div>x</div>"}') + KIMI_END, "", [("weather", {"city": "<div>x</div>"})]),
    ("deepseek_v31", f"Hm.{DS}{DS_CALL.format('weather', J_ROME)}{DS_CALL.format('add', J_ADDED)}{DS_END}", "Hm.",
     [("weather", ROME), ("add", ADDED)]),
    ("deepseek_v3", DS + DS_CALL.format("function", "weather\n```json\n" + J_ROME + "\n```") + DS_END, "", [("weather", ROME)]),
    ("functiongemma", "<start_function_call>call:weather{city:<escape>Rome<escape>,unit:<escape>C<escape>}<end_function_call>", "",
     [("weather", ROME)]),
    ("functiongemma", "<start_function_call>call:add{a:3.5,b:4}<end_function_call>", "", [("add", ADDED)]),
    ("gemma4", '<|tool_call>call:weather{city:<|"|>Rome<|"|>,unit:<|"|>C<|"|>}<tool_call|>', "", [("weather", ROME)]),
    # harmony
    ("openai", "<|channel|>final<|message|>Hello", "Hello", []),
    ("openai", f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json"
     f"<|message|>{J_ROME}<|call|>", "", [("weather", ROME)]),
    ("openai", f"<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{J_ROME}<|call|>", "", [("weather", ROME)]),
    ("openai", f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.add<|message|>{J_ADDED}"
     "<|call|>", "I look.", [("add", ADDED)]),
    # mistakes of models that vLLM reads
    ("lfm2", f"{LFM}[user(tags={{'x', 'y'}})]{LFM_END}", "", [("user", {"tags": ["x", "y"]})]),
    ("lfm2", f"{LFM}[area(digits=07), now()]{LFM_END}", "", [("area", {"digits": 7}), ("now", {})]),
    ("lfm2", f"{LFM}[weather(city='sed -n '3,4p' /a.py', unit='C')]{LFM_END}", "", [("weather", {"city": "sed -n '3,4p' /a.py", "unit": "C"})]),
    ("lfm2", f"""{LFM}[weather(city='python -c "print(a(3, sep='-'))"')]{LFM_END}""", "",
     [("weather", {"city": "python -c \"print(a(3, sep='-'))\""})]),
    ("lfm2", f"{LFM}[user(tags=('x', 'y'))]{LFM_END}", "", [("user", {"tags": ["x", "y"]})]),
    ("lfm2", f"I look.{LFM}[ ]{LFM_END}", "I look.", []),
    ("minimax", "<tool_calls>[]</tool_calls>", "", []),
    ("mistral", "Right.[TOOL_CALLS][]", "Right.", []),
    ("pythonic", "[]", "[]", []),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>', "", [("weather", {"city": "Rome"})]),
    ("hermes", '<tool_call>{"name": "user", "arguments": {"home": {"x"}}}</tool_call>', '<tool_call>{"name": "user", "arguments": {"home": {"x"}}}</tool_call>', []),
    ("deepseek_v32", "<｜DSML｜function_calls>\n" + DSML.format("Rome").replace("weather", "area").replace("city", "digits").replace("Rome", "7")
     + "</｜DSML｜function_calls>", "", [("area", {"digits": 7, "unit": "C"})]),
    ("gemma4", '<|tool_call>call:user{home:{<|"|>3<|"|>:<|"|>a]b<|"|>},age:,role:null}<tool_call|>', "",
     [("user", {"home": {"3": "a]b"}, "age": "", "role": None})]),
    *(("deepseek_v32", "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"weather\">\n<｜DSML｜parameter name=\"" + key + f"\" string=\"{flag}\">{J_ROME}"
       "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>", "", [("weather", ROME)])
      for key, flag in (("arguments", "false"), ("input", "true"))),
    ("deepseek_v32", "<｜DSML｜function_calls><｜DSML｜invoke name=\"weather\"><｜DSML｜parameter name=\"arguments\" string=\"false\">{\"a\": 1}"
     "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>", "", [("weather", {"arguments": {"a": 1}})]),
    ("deepseek_v32", "<｜DSML｜function_calls><｜DSML｜invoke name=\"weather\"><｜DSML｜parameter name=\"input\" string=\"true\">x"
     "</｜DSML｜parameter><｜DSML｜parameter name=\"city\" string=\"true\">Rome</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>", "",
     [("weather", {"input": "x", "city": "Rome"})]),
    ("kimi_k2", KIMI + KIMI_CALL.format("0", J_ROME) + KIMI_CALL.format("1", '{"digits": 7}') + KIMI_END, "", [("weather", ROME), ("area", {"digits": 7})]),
    ("kimi_k2", KIMI + KIMI_CALL.format("0", '{"colour": 1}') + KIMI_END, "*", []),
    ("cohere_command3", "<|START_RESPONSE|>It is <co>warm</co: 0:[1,2],1:[3]> in <co: 0>Rome</co: 0>.<|END_RESPONSE|>", "It is warm in Rome.", []),
    ("cohere_command3", "<|START_RESPONSE|>A <code> is </co: no end\nhere<|END_RESPONSE|>", "A <code> is </co: no end\nhere", []),
    *((name, f"<｜DSML｜{block}>\n".replace(*gone) + DSML.format("Rome") + f"</｜DSML｜{block}>", content, [("weather", ROME)])
      for name, block, gone, content in (("deepseek_v32", "function_calls", ("<｜DSML｜function_calls>\n", "I look."), "I look."),
                                         ("deepseek_v4", "tool_calls", ("<｜DSML｜tool_calls>\n", ""), ""))),
    ("gemma4", '<|tool_call>:weather{city:<|"|>Rome<|"|>}<tool_call|><|tool_call>call:now{}<tool_call|>', "", [("weather", {"city": "Rome"}), ("now", {})]),
    ("gemma4", "Mind: this.<|tool_call>:now{}<tool_call|>", "Mind: this.", [("now", {})]),
    ("lfm2", f"{LFM}[now()]{LFM_END}[now()]{LFM_END}", "[now()]", [("now", {})]),
    ("hermes", f"<tool_call>{W_ROME}</tool_call></tool_call>Done.", "Done.", [("weather", ROME)]),
    ("gigachat3", f"I look.<|message_sep|>\n\n<|function_call|>{W_ROME}", "I look.", [("weather", ROME)]),
    ("minimax_m2", M2.replace("Rome", "").join(("<minimax:tool_call>\n", "</minimax:tool_call>")).format("\n  Rome\n"), "",
     [("weather", {"city": "\n  Rome\n", "unit": "C"})]),
    ("minicpm5", '<function name="weather"><param name="city">\n<![CDATA[  Rome\n]]></param></function>', "", [("weather", {"city": "  Rome\n"})]),
    ("minimax_m3", f"{NS}<tool_call>{NS}<invoke name=\"user\">{NS}<home>{NS}<room>1{NS}</room>{NS}<room>{NS}<size>2{NS}</size>{NS}</room>{NS}</home>"
     f"{NS}</invoke>{NS}</tool_call>", "", [("user", {"home": {"room": [1, {"size": 2}]}})]),
    ("mistral", f"[TOOL_CALLS]add{J_ADDED}And now...", "And now...", [("add", ADDED)]),
    ("mistral", f"[TOOL_CALLS]add[ARGS]{J_ADDED}\nAnd now...", "And now...", [("add", ADDED)]),
    ("mistral", f"[TOOL_CALLS] [TOOL_CALLS] [{W_ROME}]", "", [("weather", ROME)]),
    ("mistral", f"[TOOL_CALLS] [TOOL_CALLS] {W_ROME}", "", [("weather", ROME)]),
    ("mistral", f"[TOOL_CALLS] [{W_ROME}][TOOL_CALLS] [{W_OSLO}]", "", [("weather", ROME), ("weather", OSLO)]),
    ("mistral", f"[TOOL_CALLS][TOOL_CALLS]add{J_ADDED}[TOOL_CALLS]now{{}}", "", [("add", ADDED), ("now", {})]),
    ("mistral", f"[TOOL_CALLS] junk [{W_ROME}]", f"[TOOL_CALLS] junk [{W_ROME}]", []),
    ("mistral", "weather[TOOL_CALLS]{not json", "weather[TOOL_CALLS]{not json", []),
    ("hermes", f"<tool_call>\n<tool_call>\n{W_ROME}\n</tool_call>", "", [("weather", ROME)]),
    ("openai", f"<|start|>assistant<|channel|>commentary to=weather <|constrain|>json<|message|>{J_ROME}<|call|>", "", [("weather", ROME)]),
    ("openai", "<|channel|>analysis to=python<|message|>print(1)<|call|><|start|>assistant<|channel|>final<|message|>1<|return|>", "1", []),
    # one bad call among good ones
    ("minimax", f"<tool_calls>\n{W_ROME}\n{{not json}}\n{W_OSLO}\n</tool_calls>", "{not json}", [("weather", ROME), ("weather", OSLO)]),
    ("kimi_k2", f"{KIMI}{KIMI_CALL.format('weather', '{')}{KIMI_CALL.format('add:1', J_ADDED)}{KIMI_END}", "*", [("add", ADDED)]),
]

REASONED: list[tuple[str, str, str, str]] = [
    # (vLLM's name of the reasoning parser, answer, reasoning, content)
    ("minimax_m3", "<mm:think>I think.</mm:think>Hello", "I think.", "Hello"),
    ("kimi_k3", "<|open|>think<|sep|>I think.<|close|>think<|sep|><|open|>response<|sep|>Hello<|close|>response<|sep|><|close|>message<|sep|>",
     "I think.", "Hello"),
    ("solar_open2", "I think.<|think:end|>Hello", "I think.", "Hello"),
    ("inkling", "<|message_model|><|content_thinking|>I think.<|end_message|><|message_model|><|content_text|>Hello<|end_message|>",
     "I think.", "Hello"),
    ("inkling", "<|content_thinking|>I think.<|content_model_end_sampling|>", "I think.", ""),
    *((name, "<think>Let me see.</think>Right.", "Let me see.", "Right.") for name in (
        "deepseek_r1", "qwen3", "glm45", "hunyuan_a13b", "minimax_m2", "step3", "olmo3", "ernie45", "kimi_k2", "nemotron", "rwkv")),
    *((name, "Let me see.</think>Right.", "Let me see.", "Right.") for name in ("deepseek_r1", "step3", "olmo3", "ernie45", "minimax_m2")),
    *((name, "<think>Let me\nsee.</think>\n\nRight.", "Let me\nsee.", "Right.") for name in ("deepseek_r1", "qwen3", "glm45")),
    *((name, "<think>Let me see", "Let me see", "") for name in ("deepseek_r1", "qwen3", "glm45", "kimi_k2")),
    *((name, "<think></think>Right.", "", "Right.") for name in ("deepseek_r1", "qwen3")),
    ("deepseek_r1", "Let me see", "Let me see", ""),
    ("qwen3", "Right.", "", "Right."),
    ("glm45", "Right.", "", "Right."),
    ("mistral", "[THINK]Let me see.[/THINK]Right.", "Let me see.", "Right."),
    ("seed_oss", "<seed:think>Let me see.</seed:think>Right.", "Let me see.", "Right."),
    ("granite", "Here is my thought process: Let me see. Here is my response: Right.", "Let me see.", "Right."),
    ("granite", "Here's my thought process:Let me see.Here's my response:Right.", "Let me see.", "Right."),
    ("hunyuan_a13b", "<think>\nLet me see.\n</think>\n<answer>\nRight.\n</answer>", "Let me see.", "Right."),
    ("apertus", "<|inner_prefix|>Let me see.<|inner_suffix|>Right.", "Let me see.", "Right."),
    ("cohere_command3", "<|START_THINKING|>Let me see.<|END_THINKING|><|START_RESPONSE|>Right.<|END_RESPONSE|>", "Let me see.", "Right."),
    ("cohere_command4", "<|START_THINKING|>A <co>rainbow: 🌈</co: 0:[1]>!<|END_THINKING|>\n<|START_RESPONSE|>foo <co>bar</co: 0:[1,2],1:[3,4]><|END_RESPONSE|>",
     "A rainbow: 🌈!", "foo bar"),
    ("openai_gptoss", "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>final<|message|>Right.<|return|>",
     "Let me see.", "Right."),
    ("openai_gptoss", "<|channel|>analysis<|message|>Let me", "Let me", ""),
]


def read(dialect: Dialect, *pieces: str, tools: Any = TOOLS, prompt: str | None = None) -> Message:
    parser = Parser(dialect, tools, prompt=prompt, new_id=lambda _: "id")
    for piece in pieces:
        parser.push(piece)
    parser.finish()
    return parser.message()


def cut(text: str) -> list[tuple[str, ...]]:
    return [(text,), tuple(text), *((text[:at], text[at:]) for at in range(1, len(text)))]


@pytest.mark.parametrize(("name", "text", "content", "calls"), FACTS, ids=lambda value: value if isinstance(value, str) else "")
def test_calls(name: str, text: str, content: str, calls: Calls) -> None:
    for pieces in cut(text):
        found = read(by_name(name), *pieces, prompt="")
        assert [(call.name, json.loads(call.arguments)) for call in found.calls] == calls, pieces
        assert content == "*" or found.content.strip() == content.strip(), pieces


@pytest.mark.parametrize(("name", "call"), [
    ("apertus", '<|tools_prefix|>[{"now": {}}]<|tools_suffix|>'), ("functiongemma", "<start_function_call>call:now{}<end_function_call>"),
    ("gemma4", "<|tool_call>call:now{}<tool_call|>"), ("glm45", "<tool_call>now\n</tool_call>"), ("xlam", '```json\n[{"name": "now", "arguments": {}}]\n```')])
def test_white_space_before_a_call(name: str, call: str) -> None:
    """These drop it, as vLLM does; elsewhere it stays as it is."""
    for text, content in ((f"I look. \n{call}", "I look."), ("I look. \n Again.  ", "I look. \n Again.  "), (f" I look.\n{call}\nDone.", " I look.Done.")):
        for pieces in cut(text):
            found = read(by_name(name), *pieces, prompt="")
            assert (found.content.replace("\nDone", "Done"), len(found.calls)) == (content, text.count(call)), pieces


def test_the_ids_that_models_write() -> None:
    text = '<|START_ACTION|>[{"tool_call_id": "7", "tool_name": "now", "parameters": {}}]<|END_ACTION|>'
    for pieces in cut(text):
        assert [call.id for call in read(by_name("cohere_command3"), *pieces).calls] == ["7"]


@pytest.mark.parametrize(("name", "text", "reasoning", "content"), REASONED, ids=lambda value: value)
def test_reasoning(name: str, text: str, reasoning: str, content: str) -> None:
    for pieces in cut(text):
        found = read(reasoning_by_name(name), *pieces, tools=None)
        assert (found.reasoning.strip(), found.content.strip()) == (reasoning, content), pieces
