"""Calls of tools in a reply: one table of formats, one incremental parser.

A call comes out when it is whole, so a stream brings the same calls as the whole reply. What looks like a call and can
not be read stays text: nothing is lost.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tracklayer.errors import UserError
from tracklayer.server.markers import Cutter


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family writes its calls: between `begin` and `end` (None: to the end of the reply).

    call: groups `name` and `args` of each call; None: JSON objects with name and arguments (or parameters).
    parameter: groups `key` and `value` in args that are not JSON. drops: markers around calls.
    bare: a reply that begins with "{" may be a call without `begin`. special: markers are special tokens.
    """

    begin: str
    end: str | None
    call: str | None = None
    parameter: str | None = None
    drops: tuple[str, ...] = ()
    bare: bool = False
    special: bool = False


HERMES = ToolFormat("<tool_call>", "</tool_call>")
DEEPSEEK_SECTION = ("<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁calls▁end\uff5c>")
TOOL_FORMATS = {
    "deepseekv3": ToolFormat(
        "<\uff5ctool▁call▁begin\uff5c>",
        "<\uff5ctool▁call▁end\uff5c>",
        call=r"\s*function<\uff5ctool▁sep\uff5c>(?P<name>[^\n]+)\n```json\s*(?P<args>.*?)\s*```\s*",
        drops=DEEPSEEK_SECTION,
        special=True,
    ),
    "deepseekv31": ToolFormat(
        "<\uff5ctool▁call▁begin\uff5c>",
        "<\uff5ctool▁call▁end\uff5c>",
        call=r"\s*(?P<name>[^\n<]+?)<\uff5ctool▁sep\uff5c>(?P<args>.*)",
        drops=DEEPSEEK_SECTION,
        special=True,
    ),
    "glm45": ToolFormat(
        "<tool_call>",
        "</tool_call>",
        call=r"\s*(?P<name>[^\s<]+)\s*(?P<args>.*)",
        parameter=r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
    ),
    "gpt-oss": ToolFormat(
        "<|channel|>commentary to=functions.",
        "<|call|>",
        call=r"(?P<name>[^\s<]+)\s*(?:<\|constrain\|>)?\s*(?:json)?\s*<\|message\|>(?P<args>.*)",
        special=True,
    ),
    "hermes": HERMES,
    "kimi_k2": ToolFormat(
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        call=r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]+):\d+)\s*<\|tool_call_argument_begin\|>(?P<args>.*)",
        drops=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        special=True,
    ),
    "llama3": ToolFormat("<|python_tag|>", None, bare=True, special=True),
    "minimax-m2": ToolFormat(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        call=r'\s*<invoke name="?(?P<name>[^">]+)"?>(?P<args>.*?)</invoke>\s*',
        parameter=r'<parameter name="?(?P<key>[^">]+)"?>(?P<value>.*?)</parameter>',
    ),
    "mistral": ToolFormat("[TOOL_CALLS]", None, special=True),
    "qwen": HERMES,
    "qwen25": HERMES,
    "qwen3_coder": ToolFormat(
        "<tool_call>",
        "</tool_call>",
        call=r"\s*<function=(?P<name>[^>\n]+)>(?P<args>.*?)</function>\s*",
        parameter=r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
    ),
}
_MISTRAL_ARGS = re.compile(r"\s*(?P<name>[\w.-]+)\s*(?:\[ARGS\])?\s*(?={)")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call; arguments is JSON text."""

    name: str
    arguments: str
    id: str

    def wire(self, index: int | None = None) -> dict[str, Any]:
        """As a message carries it; `index`: as a stream's delta does."""
        function = {"name": self.name, "arguments": self.arguments}
        call = {"id": self.id, "type": "function", "function": function}
        return call if index is None else {"index": index, **call}


class ToolParser:
    """Takes the calls out of one reply. White space around calls goes; all other text stays, in order."""

    def __init__(self, form: ToolFormat, tools: list[dict[str, Any]]) -> None:
        self._form = form
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
                self._open, self._marked = "", True
            elif marker and piece == self._form.end and self._open is not None:
                more, found = self._close(piece)
                text, calls = text + more, calls + found
            elif self._open is not None:
                self._open += piece
            elif marker and piece in self._form.drops:
                continue
            elif self._form.bare and not self._started and piece.lstrip().startswith("{"):
                self._open, self._marked, self._space = self._space + piece, False, ""
            else:
                text += self._shown(piece)
            self._started = self._started or bool(piece.strip())
        return text, calls

    def _shown(self, piece: str) -> str:
        """Text outside calls; white space at its end waits for what follows."""
        piece = self._space + piece
        shown = piece.rstrip()
        self._space = piece[len(shown) :]
        return shown

    def _close(self, end: str) -> tuple[str, list[ToolCall]]:
        assert self._open is not None
        body, self._open = self._open, None
        calls = read_calls(self._form, body, self._schemas)
        if not calls:
            return self._shown((self._form.begin if self._marked else "") + body + end), []
        self._space = ""
        self.calls += calls
        return "", calls


class ForcedParser:
    """A reply that a grammar bound to a list of calls: nothing of it is text, unless it was cut short."""

    def __init__(self) -> None:
        self._text = ""
        self.calls: list[ToolCall] = []

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        self._text += text
        return "", []

    def flush(self) -> tuple[str, list[ToolCall]]:
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
        calls.append(ToolCall(name, arguments, found.groupdict().get("id") or _new_id()))
    return [] if body[at:].strip() else calls


def _arguments(form: ToolFormat, text: str, schema: dict[str, Any]) -> str | None:
    """Arguments as JSON text; None when they are none."""
    if form.parameter is None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        return text.strip() if isinstance(value, dict) else None
    properties = schema.get("properties") or {}
    found = {m["key"]: _typed(m["value"], properties.get(m["key"])) for m in re.finditer(form.parameter, text, re.S)}
    left = re.sub(form.parameter, "", text, flags=re.S)
    return None if left.strip() else json.dumps(found, ensure_ascii=False)


def _typed(text: str, schema: Any) -> Any:
    """A value that was written without quotes: text where the schema says so, else what JSON makes of it."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


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
        calls.append(ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False), _new_id()))
    return calls


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


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
