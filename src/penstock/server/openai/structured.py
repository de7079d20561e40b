"""Reads the constraint of an answer from a body, in OpenAI's fields and in vLLM's, as StructuredOutputsParams."""

from collections.abc import Iterator

import msgspec

from penstock.core.errors import RequestError
from penstock.core.sampling import StructuredOutputsParams
from penstock.grammar.definition import define
from penstock.server.openai.protocol import JsonObjectFormat, JsonSchemaFormat, StructuralTagFormat, StructureFields


def structure_of(body: StructureFields) -> tuple[StructuredOutputsParams, str] | None:
    """The constraint in `body` and the field that has it, or None. RequestError if two fields do."""
    found = [(params, field) for params, field in _asked(body) if params is not None]
    if len(found) > 1:
        raise RequestError(f"{found[0][1]} and {found[1][1]} both constrain the answer; send one of them", param=found[1][1])
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
    """RequestError, by the name of the body's own field, if the answer cannot look like that. Takes milliseconds."""
    asked = structure_of(body)
    if asked is not None:
        try:
            define(asked[0])
        except RequestError as error:
            if asked[1] != "structured_outputs":
                # The message begins with the offline API's name of the field.
                error.message = error.message.removeprefix(f"{error.param or ''}: ")
                error.param = asked[1]
                error.args = (error.message,)
            raise
