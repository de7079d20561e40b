"""JSON Schema keywords that are ignored as annotations, refused with a reason, or have subschemas."""

ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "example", "$comment", "$schema", "$id", "id", "$anchor", "$defs",
    "definitions", "$vocabulary", "deprecated", "readOnly", "writeOnly", "discriminator", "xml", "externalDocs"})
"""Keywords that do not affect validity."""

COUNTS = frozenset({"minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength"})
"""Keywords with integer values. JSON Schema treats 2.0 as an integer, llguidance does not."""

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
    "divisibleBy": "it is a keyword of draft 3; use multipleOf"}
"""Keywords that cannot be enforced, each with the advice for the user."""

IN_PLACE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "dependentSchemas", "dependencies")
"""Keywords whose subschemas apply to the same value."""

TYPES = ("null", "boolean", "object", "array", "number", "string")
"""All types; `number` includes integers."""

MAPS_OF_SCHEMAS = ("properties", "patternProperties", "dependentSchemas")
LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
SCHEMAS = ("additionalProperties", "additionalItems", "not", "if", "then", "else", "propertyNames", "unevaluatedProperties",
           "unevaluatedItems", "contains")
