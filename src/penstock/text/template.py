"""Chat templates: loading them from a model's folder, and rendering a conversation.

A template is a Jinja program from the model's authors. It runs in Jinja's immutable sandbox with the settings, filters and
variables that transformers gives it, so the text is the same; it is compiled once."""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.core.errors import ConfigError, ModelError, RequestError
from penstock.core.files import read_json
from penstock.text import messages as chat
from penstock.text.tokenizer import read_specials

DEFAULT, TOOL_USE = "default", "tool_use"
"""Names with a meaning: the template used unless another is asked for, and the one used when there are tools."""

_MARK = "<<the final message ends here>> "
"""Appended to a message that is to be continued. Its last space shows whether the template strips messages."""

_RESERVED = frozenset({"self", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
                       "chat_template"})


class _Refusal(jinja2.TemplateError):
    """The template itself has refused, by raise_exception."""


class _Generation(Extension):
    """{% generation %}...{% endgeneration %} marks the assistant's text. Only training needs the marks."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, as in transformers: what is set inside is not seen outside.
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
            sort_keys: bool = False) -> str:
    # Jinja's own filter writes for HTML: it escapes <, > and &. Its map and select give iterators; they are written as lists.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys,
                      default=_listed)


def _listed(value: Any) -> list[Any]:
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"an object of type {type(value).__name__} cannot be written as JSON")


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


class _Sandbox(ImmutableSandboxedEnvironment):
    """An immutable sandbox, except that lists can grow and shrink, because Kimi K2's template keeps a queue in a list.

    That is harmless, because templates get only copies (`_plain`)."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return (type(obj) is list and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)


_ENVIRONMENT = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
_ENVIRONMENT.filters["tojson"] = _tojson
_ENVIRONMENT.globals["raise_exception"] = _raise_exception
_ENVIRONMENT.globals["strftime_now"] = lambda form: datetime.now().strftime(form)


class ChatTemplate:
    """The templates of one model, by name; possibly none. Immutable; may be used from several threads."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, Any]) -> None:
        """`sources` by name; `special_tokens` are variables of every one. Nothing is compiled or run before the first use."""
        self.sources = dict(sources)
        self.variables = dict(special_tokens)

    @classmethod
    def load(cls, folder: Path | str, override: str | None = None,
             special_tokens: Mapping[str, Any] | None = None) -> "ChatTemplate":
        """The templates in a model's folder, or the one that `override` is: a name among them, a file, or a template's text.

        `special_tokens` are the variables (bos_token, ...), by default what the folder's tokenizer files name. A folder without
        template gives a ChatTemplate that refuses to render. ModelError or ConfigError for what is not Jinja: the line."""
        path = Path(folder)
        variables = read_specials(path) if special_tokens is None else special_tokens
        found = _find(path)
        if override is not None:
            if override in found:
                found = {override: found[override]}
            else:
                name, text = _override(override, list(found))
                return cls._parse({name: text}, variables, ConfigError)
        return cls._parse(found, variables, ModelError)

    @classmethod
    def _parse(cls, found: Mapping[str, str], variables: Mapping[str, Any], kind: type[Exception]) -> "ChatTemplate":
        """`found` is texts by where they come from: a name, or a file."""
        for name, text in found.items():
            try:
                _ENVIRONMENT.parse(text)
            except jinja2.TemplateSyntaxError as error:
                raise kind(f"the chat template {name} is broken: line {error.lineno}: {error.message}. Give another one with "
                           "--chat-template") from None
        if len(found) == 1:
            found = {DEFAULT: next(iter(found.values()))}
        return cls(found, variables)

    def reads(self, variable: str) -> bool:
        """True if any of the templates contains this variable's name."""
        return any(variable in source for source in self.sources.values())

    def using(self, override: str) -> "ChatTemplate":
        """The same variables with another template, for one request: a name among these, or a template's text; no files."""
        if override in self.sources:
            return ChatTemplate({DEFAULT: self.sources[override]}, self.variables)
        try:
            _ENVIRONMENT.parse(override)
        except jinja2.TemplateSyntaxError as error:
            raise _broken(error) from None
        return ChatTemplate({DEFAULT: override}, self.variables)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None,
               add_generation_prompt: bool = True, continue_final_message: bool = False,
               documents: Sequence[Mapping[str, Any]] | None = None, **variables: Any) -> str:
        """The conversation as one text, special tokens spelled out: encode it without adding any.

        `tools`: OpenAI's. `add_generation_prompt` opens the assistant's turn; `continue_final_message` leaves the last message
        open. Other `variables` are the template's (enable_thinking, ...). RequestError, with its message, if it refuses."""
        compiled = self._choose(bool(tools))
        if continue_final_message and add_generation_prompt:
            raise RequestError("Cannot set both `continue_final_message` and `add_generation_prompt` to True. Leave one out",
                               param="continue_final_message", code="invalid_value")
        check_variables(variables)
        shaped = [chat.shape(message, compiled.shape) for message in chat.check(messages)]
        if continue_final_message:
            shaped[-1] = _marked(shaped[-1])
        given = {**variables, "messages": shaped, "tools": list(tools) if tools else None,
                 "documents": list(documents) if documents else None}
        plain = {name: _plain(value, name) for name, value in given.items()}
        text = self._run(compiled, {**self.variables, **plain, "add_generation_prompt": add_generation_prompt})
        return _cut(text) if continue_final_message else text

    def _choose(self, tools: bool) -> "_Compiled":
        """The template for a conversation, compiled. RequestError if there is none, or it is not Jinja."""
        name = TOOL_USE if tools and TOOL_USE in self.sources else DEFAULT
        if not self.sources:
            raise RequestError("this model has no chat template, so it is not known how it wants a conversation written; send "
                               "a plain prompt to /v1/completions, or give a template with --chat-template",
                               param="messages", code="no_chat_template")
        if name not in self.sources:
            raise RequestError(f"this model has several chat templates ({', '.join(self.sources)}) and none is the default; "
                               "choose one with --chat-template", param="messages", code="no_chat_template")
        try:
            return _compiled(self.sources[name])
        except jinja2.TemplateSyntaxError as error:
            # Such as a filter that does not exist, which parsing alone does not find.
            raise _broken(error) from None

    def _run(self, compiled: "_Compiled", variables: dict[str, Any]) -> str:
        try:
            return compiled.template.render(variables)
        except _Refusal as error:
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages",
                               code="template_error") from None
        except jinja2.UndefinedError as error:
            raise RequestError(f"the chat template needs something that is not there: {error.message}. A variable of the "
                               "template can be given in chat_template_kwargs", param="messages",
                               code="template_error") from None
        except Exception as error:  # noqa: BLE001 (a template is a program; it fails its own request)
            raise RequestError(f"the chat template fails on these messages: {type(error).__name__}: {error}", param="messages",
                               code="template_error") from None


def _broken(error: jinja2.TemplateSyntaxError) -> RequestError:
    return RequestError(f"chat_template is broken: line {error.lineno}: {error.message}", param="chat_template",
                        code="invalid_value")


def check_variables(variables: Mapping[str, Any]) -> None:
    """RequestError if a template's variables would hide something that `render` itself gives it."""
    if reserved := sorted(_RESERVED & variables.keys()):
        raise RequestError(f"chat_template_kwargs may not set {', '.join(reserved)}; these are fields of the request",
                           param="chat_template_kwargs", code="invalid_value")


class _Compiled:
    """One compiled template, and the message formats that it supports."""

    def __init__(self, source: str) -> None:
        self._source = source
        self.template = _ENVIRONMENT.from_string(source)

    @functools.cached_property
    def shape(self) -> chat.Shape:
        """Found by trial renderings: the text must appear in the result, and not inside the repr of a list or dict."""
        text, parts = "a-text", [{"type": "text", "text": "a-text"}]
        takes_parts, takes_strings = self._shows(parts), self._shows(text)
        content: Any = text if takes_strings or not takes_parts else parts
        objects = self._calls(True, content) or not self._calls(False, content)
        return chat.Shape(parts=takes_parts, strings=takes_strings or not takes_parts, arguments=objects,
                          developer="developer" in self._source, null=self._takes_null(content, objects),
                          function="a-result" in self._call(objects, content, content, role="function"))

    def _shows(self, content: Any) -> bool:
        shown = self._try([{"role": "user", "content": content}])
        return "a-text" in shown and not any(sign in shown for sign in ("'type'", '"type"'))

    def _calls(self, as_object: bool, content: Any) -> bool:
        """True if a tool call's arguments are rendered as JSON. Some templates render calls only beside a content of null."""
        shown = [self._call(as_object, content, beside) for beside in (content, None)]
        return any("a-key" in text and "{'a-key'" not in text and '\\"a-key' not in text for text in shown)

    def _takes_null(self, content: Any, as_object: bool) -> bool:
        """True if a message with tool calls and a content of null renders without the word None or null."""
        null, empty = self._call(as_object, content, None), self._call(as_object, content, "")
        return bool(null) and not any(word in null and word not in empty for word in ("None", "null"))

    def _call(self, as_object: bool, content: Any, beside: Any, role: str = "tool") -> str:
        """A conversation with a tool call, `beside` as its message's content, and its result; empty if it is refused."""
        arguments = {"a-key": "a-value"} if as_object else '{"a-key": "a-value"}'
        result = "a-result" if isinstance(content, str) else [{"type": "text", "text": "a-result"}]
        call = {"id": "call00001", "type": "function", "function": {"name": "a-tool", "arguments": arguments}}
        return self._try([{"role": "user", "content": content},
                          {"role": "assistant", "content": beside, "tool_calls": [call]},
                          {"role": role, "tool_call_id": "call00001", "name": "a-tool", "content": result},
                          {"role": "user", "content": content}])

    def _try(self, conversation: list[dict[str, Any]]) -> str:
        try:
            return self.template.render({"messages": conversation, "tools": None, "documents": None,
                                         "add_generation_prompt": True, "bos_token": "", "eos_token": ""})
        except Exception:  # noqa: BLE001 (a trial: a template may fail in any way)
            return ""


def _plain(value: Any, where: str) -> Any:
    """A copy in JSON's types only, so that a template cannot reach any object's methods. RequestError for other types."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(entry, where) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, where) for entry in value]
    raise RequestError(f"{where} holds an object of type {type(value).__name__}; possible are strings, numbers, true, false, "
                       "null, lists and objects", param=where if where in _RESERVED else "chat_template_kwargs",
                       code="invalid_value")


_compiled = functools.lru_cache(maxsize=32)(_Compiled)
"""Cached, because requests may send their own template, often the same one."""


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _MARK}
    if content:
        return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + _MARK}]}
    raise RequestError("continue_final_message needs a final message with content to continue", param="messages",
                       code="invalid_value")


def _cut(text: str) -> str:
    place = text.rfind(_MARK.rstrip())
    if place < 0:
        raise RequestError("the chat template does not show the final message as it is, so it cannot be continued; end with "
                           "another message, or leave continue_final_message out", param="continue_final_message",
                           code="template_error")
    # If the mark has lost its space, the template strips messages, so the text must be stripped as well.
    return text[:place] if text.startswith(_MARK, place) else text[:place].rstrip()


def _find(folder: Path) -> dict[str, str]:
    """The model's templates by name. Files win over tokenizer_config.json, as in transformers."""
    found: dict[str, str] = {}
    for file in ("tokenizer_config.json", "chat_template.json"):
        given = read_json(folder / file, optional=True).get("chat_template")
        if isinstance(given, str):
            found[DEFAULT] = given
        elif isinstance(given, Mapping):
            found.update({str(name): text for name, text in given.items() if isinstance(text, str)})
        elif isinstance(given, list):
            found.update({entry["name"]: entry["template"] for entry in given})
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = _text(path)
    if (folder / "chat_template.jinja").exists():
        found[DEFAULT] = _text(folder / "chat_template.jinja")
    return found


def _override(given: str, names: list[str]) -> tuple[str, str]:
    """(where it comes from, the template's text) of --chat-template. ConfigError if it is none of what it could be."""
    if "\n" not in given and len(given) < 4096 and Path(given).expanduser().is_file():
        return given, _text(Path(given).expanduser())
    if "{%" in given or "{{" in given:
        return "given as text", given
    own = f"the model's own are {', '.join(names)}" if names else "the model has none of its own"
    raise ConfigError(f"--chat-template {given!r} is neither a file, nor a template's text, nor the name of a template ({own})")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"the chat template {path} is not readable: {error}") from None

