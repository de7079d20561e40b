"""JSON Schema keywords by what becomes of them: enforced as they are, rewritten, read by people only, or refused and why."""

from __future__ import annotations

ENFORCED = frozenset({
    "type", "enum", "const", "properties", "required", "additionalProperties", "patternProperties", "minProperties",
    "maxProperties", "items", "prefixItems", "additionalItems", "minItems", "maxItems", "minLength", "maxLength", "pattern",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "anyOf", "allOf", "$ref",
})
"""llguidance enforces these."""

ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "example", "$comment", "$schema", "$id", "id", "$anchor", "$defs",
    "definitions", "$vocabulary", "deprecated", "readOnly", "writeOnly", "discriminator", "xml", "externalDocs",
})
"""These say nothing about which values are valid."""

COUNTS = frozenset({"minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength"})
"""Their values are integers; 2.0 is one to JSON Schema, and not to llguidance."""

REFUSED: dict[str, str] = {
    "contains": "an array of which one item must match cannot be enforced while it is written; constrain all items",
    "$dynamicRef": "dynamic references are not supported; use $ref",
    "$dynamicAnchor": "dynamic references are not supported; use $anchor",
    "$recursiveRef": "recursive references of draft 2019-09 are not supported; use $ref",
    "$recursiveAnchor": "recursive references of draft 2019-09 are not supported; use $ref",
    "contentSchema": "the content of strings is not constrained; use an object instead of a string of JSON",
    "contentMediaType": "the content of strings is not constrained; use an object instead of a string of JSON",
    "extends": "it is a keyword of draft 3; use allOf",
    "disallow": "it is a keyword of draft 3; use not",
    "divisibleBy": "it is a keyword of draft 3; use multipleOf",
}
"""Keywords that nothing here can enforce, and what to do instead."""

IN_PLACE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "dependentSchemas", "dependencies")
"""Keywords whose subschemas are about the same value."""

TYPES = ("null", "boolean", "object", "array", "number", "string")
"""All types; integers are numbers."""

MAPS_OF_SCHEMAS = ("properties", "patternProperties", "dependentSchemas")
LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
SCHEMAS = ("additionalProperties", "additionalItems", "not", "if", "then", "else", "propertyNames", "unevaluatedProperties",
           "unevaluatedItems", "contains")
