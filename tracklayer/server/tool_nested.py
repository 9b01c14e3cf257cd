"""Arguments of a call written as elements within elements: MARK<key>value MARK</key>, lists as `item` elements."""

from __future__ import annotations

import re
from typing import Any

from tracklayer.server.tool_formats import text_value

MAX_DEPTH = 64


def take_element(text: str, mark: str, at: int = 0) -> tuple[str, str, int] | None:
    """(tag, what is inside, where it ends) of the element that begins at `at`; None when it is not whole.

    `mark` stands before each tag.
    """
    start, open_tags = 0, list[str]()
    for tag in re.compile(re.escape(mark) + r"\s*<(?P<close>/?)(?P<name>[^<>]+)>").finditer(text, at):
        name = tag["name"].strip()
        if not open_tags:
            if tag["close"] or text[at : tag.start()].strip():
                return None
            start = tag.end()
        if not tag["close"]:
            open_tags.append(name)
            if len(open_tags) > MAX_DEPTH:
                return None
        elif open_tags.pop() != name:
            return None
        elif not open_tags:
            return name, text[start : tag.start()], tag.end()
    return None


def nested_arguments(text: str, mark: str, schema: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of a whole call by name; None when any of it can not be read. `schema`: the tool's parameters."""
    elements = _elements(text, mark)
    if elements is None:
        return None
    return {name: nested_value(inner, mark, child_schema(schema, name)) for name, inner in elements}


def nested_value(inner: str, mark: str, schema: dict[str, Any]) -> Any:
    """A list, an object or a plain value, as the elements inside say; what can not be read stays text."""
    elements = _elements(inner, mark)
    if elements and {name for name, _ in elements} == {"item"} and schema.get("type") != "object":
        return [nested_value(each, mark, child_schema(schema, "item")) for _, each in elements]
    if elements:
        found: dict[str, list[Any]] = {}
        for name, each in elements:
            found.setdefault(name, []).append(nested_value(each, mark, child_schema(schema, name)))
        return {name: values[0] if len(values) == 1 else values for name, values in found.items()}
    if not inner.strip() and schema.get("type") in ("array", "object"):
        return [] if schema["type"] == "array" else {}
    return text_value(inner, schema)


def child_schema(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """What a schema says of the element `name` in it; empty when nothing."""
    own = schema.get("items") if name == "item" and schema.get("type") == "array" else None
    own = own or (schema.get("properties") or {}).get(name) or schema.get("additionalProperties")
    return own if isinstance(own, dict) else {}


def _elements(text: str, mark: str) -> list[tuple[str, str]] | None:
    """(tag, inside) of each element of a text that holds nothing else; None when it does hold something else."""
    found, at, text = [], 0, text.rstrip()
    while at < len(text):
        taken = take_element(text, mark, at)
        if taken is None:
            return None
        name, inner, at = taken
        found.append((name, inner))
    return found
