"""Turns a user's constraint (schema, regex, choice, grammar, structural tag) into a validated llguidance grammar.

Runs where requests are parsed, without a tokenizer, and raises every error that a user can cause; `compiling.py` compiles."""

import copy
import functools
import json
from typing import TYPE_CHECKING, Any, cast

import msgspec

from penstock.core.errors import RequestError
from penstock.core.sampling import StructuredOutputsParams
from penstock.core.structure import Node
from penstock.grammar import schema as schemas
from penstock.grammar.order import with_orders
from penstock.grammar.tags import tags_node
from penstock.grammar.tools import lark_of, lark_text, regex_text
from penstock.grammar.vocabulary import Described

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper
    from llguidance._lib import JsonCompileOptions

MAX_CHARACTERS = 1_000_000
"""Maximum length of a regex, of a grammar, and of all choices together."""
MAX_CHOICES = 10_000
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_TRIES = 200
"""Maximum number of subschemas that are compiled to find the invalid one."""


def limits() -> "LLParserLimits":
    """Returns llguidance's limits for compiling (50,000 units of fuel take about a millisecond) and for each token's mask."""
    from llguidance import LLParserLimits

    return LLParserLimits(initial_lexer_fuel=5_000_000, max_grammar_size=500_000, max_lexer_states=50_000, verbose_errors=False)


def define(params: StructuredOutputsParams) -> str:
    """Returns the grammar that `params` asks for, as text for `LLMatcher`. Raises RequestError that names the invalid field
    and, for schemas, the JSON pointer. Caches the last 256 results."""
    return _defined(msgspec.json.encode(params))


@functools.lru_cache(256)
def _defined(encoded: bytes) -> str:
    # The types of the fields are checked below, with messages that name them.
    params = StructuredOutputsParams(**msgspec.json.decode(encoded))
    asked = [kind for kind in _KINDS if getattr(params, kind) is not None and (kind != "json_object" or params.json_object)]
    if len(asked) != 1:
        raise RequestError(f"structured_outputs must have exactly one of {', '.join(_KINDS)}; it has "
                           f"{' and '.join(asked) or 'none'}", param="structured_outputs")
    kind = asked[0]
    try:
        if kind in ("json", "json_object"):
            return json_grammar(params.json if kind == "json" else {"type": "object"}, params)
        grammar = _lark({"regex": _regex, "choice": _choice, "grammar": _grammar, "structural_tag": _tags}[kind](
            getattr(params, kind)))
        _check(grammar)
        return grammar
    except RequestError as error:
        error.args = (f"structured_outputs.{kind}: {error.message}",)
        error.message, error.param = error.args[0], f"structured_outputs.{kind}"
        error.code = error.code or "invalid_value"
        raise


def json_grammar(schema: Any, params: StructuredOutputsParams) -> str:
    """Returns the grammar of a JSON schema, given as an object or as text. Raises UnenforceableError with the JSON pointer."""
    schema = _loaded(schema, "the schema")
    if params.disable_additional_properties:
        schema = _closed(schema)
    try:
        checked = schemas.enforceable(schema)
        grammar = _json_grammar(with_orders(checked), params)
        message = _fault(grammar)
        if message:
            # llguidance refuses the schema, or only the added property orders.
            grammar = _json_grammar(checked, params)
            message = _fault(grammar)
        if message:
            raise _located(checked, params, message)
    except schemas.UnenforceableError as error:
        raise schemas.UnenforceableError(_present(schema, error.pointer), error.why) from None
    return grammar


def node_grammar(node: Node, special: dict[str, int]) -> str:
    """Returns the grammar of a dialect's structure (`grammar/tools.py`). `special` maps the special tokens' texts to ids."""
    grammar = _lark(lark_of(node, special))
    _check(grammar, 1 << max(max(special.values(), default=0), 257).bit_length())
    return grammar


def _json_grammar(schema: Any, params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    options: dict[str, Any] = dict(schemas.OPTIONS)
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    if params.disable_any_whitespace:
        options |= {"whitespace_flexible": False, "whitespace_pattern": None}
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=cast("JsonCompileOptions", options))


def _closed(schema: Any) -> Any:
    """Returns the schema with `additionalProperties: false` wherever it lists properties and does not mention others."""
    schema = copy.deepcopy(schema)
    for part, _ in list(schemas.children(schema, "#", deep=True)):
        if isinstance(part, dict) and "properties" in part:
            part.setdefault("additionalProperties", False)
    return schema


def _lark(text: str) -> str:
    """Returns a grammar's text in a form that llguidance cannot take for JSON, which begins with a brace."""
    return f"// Lark\n{text}"


def _regex(pattern: Any) -> str:
    _check_length(pattern, "the regex")
    return f"start: REGEX\nREGEX: {regex_text(pattern)}\n"


def _choice(choices: Any) -> str:
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise RequestError("it must be a list of non-empty strings")
    if len(choices) > MAX_CHOICES or sum(map(len, choices)) > MAX_CHARACTERS:
        raise RequestError(f"at most {MAX_CHOICES} choices with {MAX_CHARACTERS} characters in all are possible")
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices)) + "\n"


def _grammar(text: Any) -> str:
    _check_length(text, "the grammar")
    return lark_text(text)


def _tags(tag: Any) -> str:
    if isinstance(tag, str):
        _check_length(tag, "the structural tag")
    return lark_of(tags_node(_loaded(tag, "the structural tag")), {})


def _loaded(value: Any, name: str) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise RequestError(f"{name} is not JSON: {error}") from None


def _check_length(text: Any, name: str) -> None:
    if not isinstance(text, str) or not text:
        raise RequestError("it must be a non-empty string")
    if len(text) > MAX_CHARACTERS:
        raise RequestError(f"{name} has {len(text)} characters; at most {MAX_CHARACTERS} are possible")


def _check(grammar: str, size: int = 257) -> None:
    if message := _fault(grammar, size):
        raise RequestError(f"the grammar cannot be used: {message}")


def _fault(grammar: str, size: int = 257) -> str:
    """Returns the reason why llguidance cannot enforce a grammar or no text satisfies it; empty if there is none."""
    from llguidance import LLMatcher

    matcher = LLMatcher(_bytes_tokenizer(size), grammar, log_level=0, limits=limits())
    matcher.compute_bitmask()
    if matcher.is_error():
        lines = matcher.get_error().split("<state>")[0].splitlines()[:4]
        return " ".join(line.strip() for line in lines if line.strip(" ^|"))[:500]
    return "no text is valid under it" if matcher.is_stopped() and not matcher.is_accepting() else ""


@functools.cache
def _bytes_tokenizer(size: int = 257) -> "LLTokenizer":
    """Returns a tokenizer of single bytes, which can validate grammars; ids up to `size` without text are special tokens."""
    from llguidance import LLTokenizer

    tokens = [*(bytes([byte]) for byte in range(256)), b"<end>", *[b""] * (size - 257)]
    return LLTokenizer(cast("TokenizerWrapper", Described(tokens, lambda text: list(text.encode()), 256, None, [256])))


def _located(schema: Any, params: StructuredOutputsParams, message: str) -> schemas.UnenforceableError:
    """Returns the error for a schema that llguidance refuses, located at the deepest subschema that it refuses by itself."""
    place, found, tries = "#", message, _TRIES
    definitions = {key: schema[key] for key in ("$defs", "definitions", "$schema") if key in schema}
    here: Any = schema
    while True:
        for part, pointer in [*schemas.children(here, place), *_target(here, schema)]:
            tries -= 1
            if tries < 0 or not isinstance(part, dict):
                continue
            if why := _fault(_json_grammar({**definitions, **part}, params)):
                place, here, found = pointer, part, why
                break
        else:
            return schemas.UnenforceableError(place, found)


def _present(schema: Any, pointer: str) -> str:
    """Returns the longest part of the pointer that exists in the user's schema: rewriting adds subschemas."""
    while pointer != "#":
        try:
            schemas.resolve_in(schema, pointer)
            break
        except KeyError:
            pointer = pointer.rpartition("/")[0] or "#"
    return pointer


def _target(schema: Any, root: Any) -> list[tuple[Any, str]]:
    """Returns (target, reference) of a schema with a reference; None if it has none or the target is a reference itself."""
    if not isinstance(schema, dict) or "$ref" not in schema:
        return []
    target = schemas.resolve_in(root, schema["$ref"])
    return [] if isinstance(target, dict) and "$ref" in target else [(target, schema["$ref"])]
