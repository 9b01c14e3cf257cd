"""Calls of tools in a reply: one incremental parser for all forms.

In a whole reply, what looks like a call and can not be read stays text: nothing is lost. In a stream, a call whose
name was told already keeps what follows as its arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from tracklayer.errors import UserError
from tracklayer.server.markers import Cutter
from tracklayer.server.tool_formats import HERMES, ToolCall, ToolFormat, new_id, value_of
from tracklayer.server.tool_nested import nested_arguments
from tracklayer.server.tool_pieces import CallPieces

_MISTRAL_ARGS = re.compile(r"\s*(?P<name>[\w.-]+)\s*(?:\[ARGS\])?\s*(?={)")


class ToolParser:
    """Takes the calls out of one reply. White space around calls goes; all other text stays, in order.

    `stream`: calls come in pieces, as they are written.
    """

    def __init__(self, form: ToolFormat, tools: list[dict[str, Any]], *, stream: bool = False) -> None:
        self._form = form
        self._stream = stream
        self._pieces: CallPieces | None = None
        self._schemas = {f["name"]: f.get("parameters") or {} for f in map(function_of, tools)}
        end = () if form.end is None else (form.end,)
        self._cutter = Cutter((form.begin, *end, *form.drops))
        self._open: str | None = None  # text of the call that is open
        self._marked = True  # whether the open call began with `begin`
        self._space = ""
        self._started = False
        self.calls: list[ToolCall] = []

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """(new text, new calls) after more of the reply."""
        return self._take(self._cutter.feed(text))

    def flush(self) -> tuple[str, list[ToolCall]]:
        """The rest, at the end of the reply; a call without its end marker is read too."""
        text, calls = self._take(self._cutter.flush())
        if self._open is not None:
            more, found = self._close("")
            text, calls = text + more, calls + found
        if self._space and not self.calls:
            text += self._space
        self._space = ""
        return text, calls

    def _take(self, pieces: Iterable[tuple[str, bool]]) -> tuple[str, list[ToolCall]]:
        text, calls = "", list[ToolCall]()
        for piece, marker in pieces:
            if marker and piece == self._form.begin and self._open is None:
                calls += self._begin("", marked=True)
            elif marker and piece == self._form.end and self._open is not None:
                more, found = self._close(piece)
                text, calls = text + more, calls + found
            elif self._open is not None:
                self._open += piece
                calls += self._pieces.feed(piece) if self._pieces else []
            elif marker and piece in self._form.drops:
                continue
            elif self._form.bare and not self._started and piece.lstrip().startswith("{"):
                calls += self._begin(self._space + piece, marked=False)
                self._space = ""
            else:
                text += self._shown(piece)
            self._started = self._started or bool(piece.strip())
        return text, calls

    def _begin(self, body: str, *, marked: bool) -> list[ToolCall]:
        self._open, self._marked = body, marked
        self._pieces = CallPieces(self._form, self._schemas) if self._stream else None
        return self._pieces.feed(body) if self._pieces else []

    def _shown(self, piece: str) -> str:
        """Text outside calls; white space at its end waits for what follows."""
        piece = self._space + piece
        shown = piece.rstrip()
        self._space = piece[len(shown) :]
        return shown

    def _close(self, end: str) -> tuple[str, list[ToolCall]]:
        assert self._open is not None
        body, self._open = self._open, None
        if self._pieces is not None and self._pieces.begun:
            self._space = ""
            rest, last = self._pieces.close()
            more = read_calls(self._form, rest, self._schemas) if rest else []
            self.calls += more or [ToolCall(None, "")]
            return "" if more else self._shown(rest), last + more
        calls = read_calls(self._form, body, self._schemas)
        if not calls:
            return self._shown((self._form.begin if self._marked else "") + body + end), []
        self._space = ""
        self.calls += calls
        return "", calls


class ForcedParser:
    """A reply that a grammar bound to a list of calls: nothing of it is text, unless it was cut short.

    `stream`: calls come in pieces, as they are written.
    """

    def __init__(self, tools: list[dict[str, Any]], *, stream: bool = False) -> None:
        self._text = ""
        schemas = {f["name"]: f.get("parameters") or {} for f in map(function_of, tools)}
        self._pieces = CallPieces(HERMES, schemas) if stream else None
        self.calls: list[ToolCall] = []

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        self._text += text
        return "", self._pieces.feed(text) if self._pieces else []

    def flush(self) -> tuple[str, list[ToolCall]]:
        if self._pieces is not None and self._pieces.begun:
            return self._pieces.close()
        self.calls = _read_json(self._text)
        return ("", self.calls) if self.calls else (self._text, [])


def read_calls(form: ToolFormat, body: str, schemas: dict[str, Any]) -> list[ToolCall]:
    """The calls between two markers; empty when any of it can not be read."""
    if form.call is None:
        return _read_json(body)
    calls, at = [], 0
    for found in re.finditer(form.call, body, re.DOTALL):
        if body[at : found.start()].strip():
            return []
        at = found.end()
        name = found["name"].strip()
        arguments = _arguments(form, found["args"], schemas.get(name, {}))
        if arguments is None:
            return []
        calls.append(ToolCall(name, arguments, found.groupdict().get("id") or new_id()))
    return [] if body[at:].strip() else calls


def _arguments(form: ToolFormat, text: str, schema: dict[str, Any]) -> str | None:
    """Arguments as JSON text; None when they are none."""
    if form.nested is not None and not text.lstrip().startswith("{"):
        nested = nested_arguments(text, form.nested, schema)
        return None if nested is None else json.dumps(nested, ensure_ascii=False)
    if form.parameter is None or text.lstrip().startswith("{"):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        return text.strip() if isinstance(value, dict) else None
    found = {m["key"]: value_of(m, schema) for m in re.finditer(form.parameter, text, re.S)}
    left = re.sub(form.parameter, "", text, flags=re.S)
    return None if left.strip() else json.dumps(found, ensure_ascii=False)


def _read_json(body: str) -> list[ToolCall]:
    """Calls written as JSON: an object, a list, several in a row (";" between), or Mistral's name{arguments}."""
    decoder, values, body = json.JSONDecoder(), list[Any](), body.strip().removesuffix("</s>")
    at = 0
    while at < len(body):
        named = _MISTRAL_ARGS.match(body, at)
        try:
            value, at = decoder.raw_decode(body, named.end() if named else at)
        except (ValueError, RecursionError):
            return []
        values += [{"name": named["name"], "arguments": value}] if named else value if type(value) is list else [value]
        at += len(body[at:]) - len(body[at:].lstrip("; \t\r\n"))
    calls = []
    for value in values:
        arguments = value.get("arguments", value.get("parameters")) if isinstance(value, dict) else None
        if not isinstance(arguments, dict) or not isinstance(value.get("name"), str):
            return []
        calls.append(ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False), new_id()))
    return calls


def function_of(tool: dict[str, Any]) -> dict[str, Any]:
    """The function of a tool. Raises UserError when it has no name."""
    function = tool.get("function", tool)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(f"each tool must hold function.name, got {tool!r:.80}")
    if not isinstance(function.get("parameters") or {}, dict):
        raise UserError(f"tool {function['name']}: parameters must be a JSON schema (an object)")
    return function


def forced_schema(tools: list[dict[str, Any]], name: str | None, *, several: bool) -> dict[str, Any]:
    """JSON schema of a reply that must be a list of calls (of the tool `name` alone). Raises UserError."""
    functions = [f for f in map(function_of, tools) if name in (None, f["name"])]
    if not functions:
        known = ", ".join(f["name"] for f in map(function_of, tools)) or "there are none"
        raise UserError(f"tool_choice needs a tool{f' named {name!r}' if name else ''} in tools; {known}")
    shared: dict[str, Any] = {}
    calls = []
    for function in functions:
        parameters = dict(function.get("parameters") or {"type": "object"})
        for key, value in (parameters.pop("$defs", None) or {}).items():
            if shared.setdefault(key, value) != value:
                raise UserError(f"two tools define {key!r} in $defs differently; rename one")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": items}
    if not several or name is not None:
        schema["maxItems"] = 1
    return schema | ({"$defs": shared} if shared else {})
