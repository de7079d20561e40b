"""Reads the constraint of an answer from a body, in OpenAI's fields and in vLLM's, as StructuredOutputsParams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from penstock.core.errors import RequestError
from penstock.core.sampling import StructuredOutputsParams
from penstock.grammar.definition import define


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    pass


class JsonSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    schema: dict[str, Any] | bool
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    """A schema is always enforced to the letter."""


class JsonSchemaFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


class StructuralTagFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="structural_tag"):
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat


class StructureFields(msgspec.Struct, kw_only=True):
    """The fields of a body that constrain the answer; no more than one of them may."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsParams | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


def structure_of(body: StructureFields) -> tuple[StructuredOutputsParams, str] | None:
    """The constraint in `body` and the field that has it, or None. RequestError if two fields do."""
    found = [(params, field) for params, field in _asked(body) if params is not None]
    if len(found) > 1:
        raise RequestError(f"{found[0][1]} and {found[1][1]} both constrain the answer; send one of them", param=found[1][1],
                           code="invalid_value")
    return found[0] if found else None


def _asked(body: StructureFields) -> Iterator[tuple[StructuredOutputsParams | None, str]]:
    wanted = body.response_format
    if isinstance(wanted, JsonObjectFormat):
        yield StructuredOutputsParams(json_object=True), "response_format"
    elif isinstance(wanted, JsonSchemaFormat):
        yield StructuredOutputsParams(json=wanted.json_schema.schema), "response_format.json_schema.schema"
    elif isinstance(wanted, StructuralTagFormat):
        tag = {name: value for name, value in msgspec.to_builtins(wanted).items() if value is not None}
        yield StructuredOutputsParams(structural_tag=tag), "response_format"
    if body.structured_outputs is not None:
        yield body.structured_outputs, "structured_outputs"
    for kind in ("json", "regex", "choice", "grammar"):
        value = getattr(body, f"guided_{kind}")
        if value is not None:
            yield StructuredOutputsParams(**{kind: value}), f"guided_{kind}"


def check_structure(body: StructureFields) -> None:
    """RequestError, by the name of the body's own field, if the answer cannot be made to look like that. May take some
    milliseconds."""
    asked = structure_of(body)
    if asked is not None:
        with _named(asked[1]):
            define(asked[0])


@contextmanager
def _named(field: str) -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        param = error.param or ""
        if field != "structured_outputs":
            # The message begins with the offline API's name of the field.
            error.message = error.message.removeprefix(f"{param}: ")
            error.param = field
            error.args = (error.message,)
        raise
