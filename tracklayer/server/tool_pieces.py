"""A call of a tool while it is written: its name first, then its arguments piece by piece, for streams.

Only what begins like a readable call of a known tool comes out early. Everything else waits for the end of the call,
and is then read as a whole (tool_parsers.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from tracklayer.server.tool_formats import ToolCall, ToolFormat, new_id, value_of
from tracklayer.server.tool_nested import child_schema, nested_value, take_element

HEAD_CHARACTERS = 4096  # a call whose name has not come by then is read when it is whole
JSON_HEADS = (
    r'[\s,;\[\]]*(?P<outer>\{)\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)',
    r"[\s,;\[\]]*(?P<name>[\w.-]+)\s*(?:\[ARGS\])?\s*(?=\{)",
)
ARGS = re.compile(r"\(\?P<args>[^)]*\)")


class JsonEnd:
    """Finds where a JSON object ends, `depth` brackets deep, in text that comes in pieces."""

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._string, self._escaped = depth, False, False

    def find(self, text: str) -> int | None:
        """Characters up to and with the last bracket; None when it is not in `text`, which is then used up."""
        for i, c in enumerate(text):
            if self._string:
                if self._escaped:
                    self._escaped = False
                elif c == "\\":
                    self._escaped = True
                elif c == '"':
                    self._string = False
            elif c == '"':
                self._string = True
            elif c in "{[":
                self._depth += 1
            elif c in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return i + 1
        return None


class CallPieces:
    """The calls between two markers, as they come. `begun`: something came out, so the rest must come this way too.

    schemas: parameters of the known tools by name.
    """

    def __init__(self, form: ToolFormat, schemas: dict[str, Any]) -> None:
        self._form, self._schemas = form, schemas
        head, tail = ARGS.split(form.call) if form.call else ("", "")
        opening = re.escape(form.nested) if form.nested else "<" if form.parameter else r"\{"
        starts = (rf"{head}\s*(?={opening})",) if form.call else JSON_HEADS
        self._heads = [re.compile(start, re.DOTALL) for start in starts]
        self._tail = re.compile(r"\s*" + tail, re.DOTALL)
        self._text = ""
        self._state: Callable[[], ToolCall | None] | None = self._head
        self._scan = JsonEnd()
        self._outer = False
        self._schema: dict[str, Any] = {}
        self._keys = 0
        self._looked = 0
        self.begun = False

    def feed(self, text: str) -> list[ToolCall]:
        """What more of the text brings: first a name, then arguments, as JSON text to be joined."""
        self._text += text
        found = []
        while self._state is not None and self._text:
            before = (self._state, self._text)
            piece = self._state()
            if piece is not None:
                found.append(piece)
                self.begun = True
            if (self._state, self._text) == before:
                break
        return found

    def close(self) -> tuple[str, list[ToolCall]]:
        """(what was not taken, the last piece) at the end of the calls."""
        state, rest = self._state, self._text
        if state == self._parameters:
            return rest.strip(), [ToolCall(None, "}" if self._keys else "{}")]
        junk = "" if state in (self._arguments, self._around) else rest.strip(" \t\r\n,;]").removesuffix("</s>")
        return junk, []

    # states: each takes what it can of the text and says who goes on

    def _head(self) -> ToolCall | None:
        found = next((m for head in self._heads if (m := head.match(self._text))), None)
        if found is None:
            self._state = self._head if len(self._text) < HEAD_CHARACTERS else None
            return None
        groups, name = found.groupdict(), found["name"].strip()
        if name not in self._schemas:
            self._state = None
            return None
        self._text = self._text[found.end() :]
        self._outer = groups.get("outer") is not None
        if self._form.parameter or self._form.nested:
            self._schema, self._keys, self._looked = self._schemas[name], 0, 0
            self._state = self._parameters
        else:
            self._scan = JsonEnd()
            self._state = self._arguments
        return ToolCall(name, "", groups.get("id") or new_id())

    def _arguments(self) -> ToolCall:
        end = self._scan.find(self._text)
        if end is None:
            part, self._text = self._text, ""
            return ToolCall(None, part)
        part, self._text = self._text[:end], self._text[end:]
        self._scan = JsonEnd(depth=1)
        self._state = self._around if self._outer else self._end
        return ToolCall(None, part)

    def _around(self) -> None:
        """What follows the arguments in the object that holds them."""
        end = self._scan.find(self._text)
        self._text = "" if end is None else self._text[end:]
        self._state = self._around if end is None else self._head

    def _end(self) -> None:
        """What a form writes after a call."""
        found = self._tail.match(self._text)
        if found is not None:
            self._text = self._text[found.end() :]
            self._state = self._head

    def _parameters(self) -> ToolCall | None:
        """The next whole parameter, or the end of the call."""
        tail = self._tail.match(self._text) if self._tail.pattern != r"\s*" else None
        if tail is not None:
            self._text, self._state = self._text[tail.end() :], self._head
            return ToolCall(None, "}" if self._keys else "{}")
        if self._form.nested:
            return self._element(self._form.nested)
        parameter = self._form.parameter or ""
        closing = parameter[parameter.rindex(")") + 1 :]
        ended = re.compile(closing).search(self._text, self._looked)
        if ended is None:
            self._looked = max(0, len(self._text) - len(closing))
            return None
        self._looked = 0
        found = re.compile(r"\s*" + parameter, re.DOTALL).match(self._text)
        if found is None:
            self._state = None
            return ToolCall(None, "}" if self._keys else "{}")
        self._text = self._text[found.end() :]
        return self._pair(found["key"], value_of(found, self._schema))

    def _element(self, mark: str) -> ToolCall | None:
        """The next parameter that is a whole element. What is none waits for the end of the calls."""
        news, self._looked = self._text[self._looked :], len(self._text)
        taken = take_element(self._text, mark) if ">" in news else None
        if taken is None:
            return None
        name, inner, end = taken
        self._text, self._looked = self._text[end:], 0
        return self._pair(name, nested_value(inner, mark, child_schema(self._schema, name)))

    def _pair(self, key: str, value: Any) -> ToolCall:
        self._keys += 1
        pair = json.dumps({key: value}, ensure_ascii=False)[1:-1]
        return ToolCall(None, ("{" if self._keys == 1 else ", ") + pair)
