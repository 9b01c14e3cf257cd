"""How families write calls of tools: one table of formats, and the call that comes out."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, replace
from typing import Any


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


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call, or a piece of it; arguments is JSON text. name, id None: more arguments of the call before."""

    name: str | None
    arguments: str
    id: str | None = None

    def wire(self, index: int | None = None) -> dict[str, Any]:
        """As a message carries it; `index`: as a stream's delta does."""
        if self.name is None:
            return {"index": index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        call = {"id": self.id, "type": "function", "function": function}
        return call if index is None else {"index": index, **call}


def merged(calls: list[ToolCall]) -> list[ToolCall]:
    """The same pieces in as few as can be: arguments that follow something are joined to it."""
    found: list[ToolCall] = []
    for call in calls:
        if call.name is None and found:
            found[-1] = replace(found[-1], arguments=found[-1].arguments + call.arguments)
        else:
            found.append(call)
    return found


def typed(text: str, schema: Any) -> Any:
    """A value that was written without quotes: text where the schema says so, else what JSON makes of it."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
