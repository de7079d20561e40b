"""Converts structural tags to structures: vLLM's older form (structures and triggers) and its newer one (a tree of formats)."""

from typing import Any

from penstock.core.errors import RequestError
from penstock.core.structure import Either, Json, Lark, Literal, Node, Regex, Repeat, Sequence, Triggered, Until


def tags_node(tag: Any) -> Node:
    """Returns the structure that a structural tag describes. Raises RequestError with the reason."""
    if not isinstance(tag, dict) or tag.get("type", "structural_tag") != "structural_tag":
        raise RequestError('a structural tag must be an object with the type "structural_tag"')
    if "format" in tag:
        return _format(tag["format"], "#/format")
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list):
        raise RequestError("a structural tag needs structures (a list of begin, schema and end) and triggers, or a format")
    return _triggered([_structure(entry, f"#/structures/{at}") for at, entry in enumerate(structures)], triggers, "#/triggers")


def _structure(entry: Any, place: str) -> tuple[str, Node]:
    schema = _get(entry, "schema", dict | bool, place, {})
    return _get(entry, "begin", str, place), Sequence((Json(schema), Literal(_get(entry, "end", str, place, ""))))


def _triggered(tags: list[tuple[str, Node]], triggers: list[Any], place: str, least: int = 0, most: int | None = None) -> Node:
    """Returns free text with tags: a trigger is followed by the rest of one of the tags that begin with it."""
    found = []
    for trigger in triggers:
        if not isinstance(trigger, str) or not trigger:
            raise RequestError(f"the trigger at {place} must be a non-empty string")
        rests = tuple(Sequence((Literal(begin.removeprefix(trigger)), body)) for begin, body in tags
                      if begin.startswith(trigger))
        if not rests:
            raise RequestError(f"no tag begins with the trigger {trigger!r} ({place})")
        found.append((trigger, Either(rests)))
    orphan = next((begin for begin, _ in tags if not any(begin.startswith(trigger) for trigger in triggers)), None)
    if orphan is not None:
        raise RequestError(f"the tag {orphan!r} begins with none of the triggers")
    return Triggered(tuple(found), least, most)


def _format(value: Any, place: str) -> Node:
    kind = _get(value, "type", str, place)
    if kind not in _FORMATS:
        raise RequestError(f"the format {kind!r} at {place} is not known; known are {', '.join(_FORMATS)}")
    found: Node = _FORMATS[kind](value, place)
    return found


def _elements(value: Any, place: str) -> tuple[Node, ...]:
    nodes = [_format(part, f"{place}/elements/{at}") for at, part in enumerate(_get(value, "elements", list, place))]
    # Text ends where the next literal begins.
    return tuple(Until(following.text) if node == _TEXT and isinstance(following, Literal) else node
                 for node, following in zip(nodes, [*nodes[1:], None], strict=True))


def _tag(value: Any, place: str) -> Sequence:
    begin, end = _get(value, "begin", str, place), _get(value, "end", str, place)
    content = _format(_get(value, "content", dict, place), f"{place}/content")
    return Sequence((Literal(begin), Until(end) if content == _TEXT and end else content, Literal(end)))


def _triggered_tags(value: Any, place: str) -> Node:
    tags, least, most = _repeated(value, place)
    begun: list[tuple[str, Node]] = [(tag.parts[0].text, Sequence(tag.parts[1:])) for tag in tags
                                     if isinstance(tag.parts[0], Literal)]
    return _triggered(begun, _get(value, "triggers", list, place), f"{place}/triggers", least, most)


def _separated_tags(value: Any, place: str) -> Node:
    tags, least, most = _repeated(value, place)
    return Repeat(Either(tags), _get(value, "separator", str, place), least, most)


def _repeated(value: Any, place: str) -> tuple[tuple[Sequence, ...], int, int | None]:
    """(tags, how many there must be, how many there may be)."""
    tags = tuple(_tag(tag, f"{place}/tags/{at}") for at, tag in enumerate(_get(value, "tags", list, place)))
    return tags, int(bool(value.get("at_least_one"))), 1 if value.get("stop_after_first") else None


def _get(value: Any, name: str, kind: Any, place: str, default: Any = None) -> Any:
    found = value.get(name, default) if isinstance(value, dict) else None
    if not isinstance(found, kind):
        raise RequestError(f"{place}/{name} is missing, or not of the right type")
    return found


_TEXT = Regex("(?s:.*)")
_FORMATS: dict[str, Any] = {
    "const_string": lambda value, place: Literal(_get(value, "value", str, place)),
    "json_schema": lambda value, place: Json(_get(value, "json_schema", dict | bool, place)),
    "regex": lambda value, place: Regex(_get(value, "pattern", str, place)),
    "grammar": lambda value, place: Lark(_get(value, "grammar", str, place)),
    "any_text": lambda _value, _place: _TEXT,
    "sequence": lambda value, place: Sequence(_elements(value, place)),
    "or": lambda value, place: Either(_elements(value, place)),
    "tag": _tag, "triggered_tags": _triggered_tags, "tags_with_separator": _separated_tags}
