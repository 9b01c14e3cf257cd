"""How families write calls of tools: one table of formats, and the call that comes out."""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass, replace
from typing import Any

from tracklayer.errors import UserError


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family writes its calls: between `begin` and `end` (None: to the end of the reply).

    call: groups `name` and `args` of each call; None: JSON objects with name and arguments (or parameters).
    parameter: groups `key` and `value` in args that are not JSON, and `text`, "true" or "string" where the value
    is text whatever it looks like. drops: markers around calls.
    nested: what stands before each tag where arguments are elements within elements (tool_nested.py), in place of
    `parameter`.
    bare: a reply that begins with "{" may be a call without `begin`. special: markers are special tokens.
    """

    begin: str
    end: str | None
    call: str | None = None
    parameter: str | None = None
    nested: str | None = None
    drops: tuple[str, ...] = ()
    bare: bool = False
    special: bool = False


HERMES = ToolFormat("<tool_call>", "</tool_call>")
ARG_PAIRS = r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
GLM = ToolFormat("<tool_call>", "</tool_call>", call=r"\s*(?P<name>[^\s<]+)\s*(?P<args>.*)", parameter=ARG_PAIRS)
CODER = ToolFormat(
    "<tool_call>",
    "</tool_call>",
    call=r"\s*<function=(?P<name>[^>\n]+)>(?P<args>.*?)</function>\s*",
    parameter=r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
)


def dsml(section: str) -> ToolFormat:
    """DeepSeek's tags, in a section of this name."""
    tag = "\uff5cDSML\uff5c"
    return ToolFormat(
        f"<{tag}{section}>",
        f"</{tag}{section}>",
        call=rf'\s*<{tag}invoke\s+name="(?P<name>[^"]+)"\s*>(?P<args>.*?)</{tag}invoke>\s*',
        parameter=rf'<{tag}parameter\s+name="(?P<key>[^"]+)"\s+string="(?P<text>true|false)"\s*>(?P<value>.*?)'
        rf"</{tag}parameter>",
        special=True,
    )


KIMI_K3_CHANNELS = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
MINIMAX_M3 = "]<]minimax[>["  # a token of its own before each tag
STEP3_SECTION = ("<\uff5ctool_calls_begin\uff5c>", "<\uff5ctool_calls_end\uff5c>")
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
    "deepseekv32": dsml("function_calls"),
    "deepseekv4": dsml("tool_calls"),
    "glm": GLM,
    "glm45": GLM,
    "glm47": GLM,
    "gpt-oss": ToolFormat(
        "<|channel|>commentary to=functions.",
        "<|call|>",
        call=r"(?P<name>[^\s<]+)\s*(?:<\|constrain\|>)?\s*(?:json)?\s*<\|message\|>(?P<args>.*)",
        special=True,
    ),
    "hermes": HERMES,
    "hunyuan": ToolFormat(
        "<tool_call>",
        "</tool_call>",
        call=r"\s*(?P<name>[^\s<]+)\s*<tool_sep>(?P<args>.*)",
        parameter=ARG_PAIRS,
        drops=("<tool_calls>", "</tool_calls>"),
        special=True,
    ),
    "kimi_k2": ToolFormat(
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        call=r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]+):\d+)\s*<\|tool_call_argument_begin\|>(?P<args>.*)",
        drops=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        special=True,
    ),
    "kimi_k3": ToolFormat(
        "<|open|>tools<|sep|>",
        "<|close|>tools<|sep|>",
        call=r'\s*<\|open\|>call\s+tool="(?P<name>[^"]+)"[^<]*<\|sep\|>(?P<args>.*?)<\|close\|>call<\|sep\|>\s*',
        parameter=r'<\|open\|>argument\s+key="(?P<key>[^"]+)"\s+type="(?P<text>\w+)"\s*<\|sep\|>(?P<value>.*?)'
        r"<\|close\|>argument<\|sep\|>",
        drops=KIMI_K3_CHANNELS,
        special=True,
    ),
    "ling3": GLM,
    "llama3": ToolFormat("<|python_tag|>", None, bare=True, special=True),
    "minimax-m2": ToolFormat(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        call=r'\s*<invoke name="?(?P<name>[^">]+)"?>(?P<args>.*?)</invoke>\s*',
        parameter=r'<parameter name="?(?P<key>[^">]+)"?>(?P<value>.*?)</parameter>',
    ),
    "minimax-m3": ToolFormat(
        MINIMAX_M3 + "<tool_call>",
        MINIMAX_M3 + "</tool_call>",
        call=rf'\s*{re.escape(MINIMAX_M3)}\s*<invoke name="(?P<name>[^">]+)">(?P<args>.*?)'
        rf"{re.escape(MINIMAX_M3)}\s*</invoke>\s*",
        nested=MINIMAX_M3,
        special=True,
    ),
    "mimo": CODER,
    "mistral": ToolFormat("[TOOL_CALLS]", None, special=True),
    "qwen": HERMES,
    "qwen25": HERMES,
    "qwen3_coder": CODER,
    "step3": ToolFormat(
        "<\uff5ctool_call_begin\uff5c>",
        "<\uff5ctool_call_end\uff5c>",
        call=r"\s*function<\uff5ctool_sep\uff5c>\s*"
        r'<steptml:invoke\s+name="(?P<name>[^"]+)">(?P<args>.*?)</steptml:invoke>\s*',
        parameter=r'<steptml:parameter\s+name="(?P<key>[^"]+)">(?P<value>.*?)</steptml:parameter>',
        drops=STEP3_SECTION,
        special=True,
    ),
    "step3p5": CODER,
}
# What a chat template holds when its family writes calls so; the first that fits wins.
TELLS = (
    (("<tool_sep>", "<arg_key>"), "hunyuan"),
    (("<arg_key>",), "glm45"),
    (("\uff5cDSML\uff5c", "function_calls"), "deepseekv32"),
    (("\uff5cDSML\uff5c", "tool_calls"), "deepseekv4"),
    (("<\uff5ctool▁call▁begin\uff5c>", "```json"), "deepseekv3"),
    (("<\uff5ctool▁call▁begin\uff5c>",), "deepseekv31"),
    (("<|tool_call_begin|>",), "kimi_k2"),
    (("<|open|>", "<|sep|>"), "kimi_k3"),
    (("<steptml:invoke",), "step3"),
    (("<minimax:tool_call>",), "minimax-m2"),
    ((MINIMAX_M3,), "minimax-m3"),
    (("to=functions.",), "gpt-oss"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|python_tag|>",), "llama3"),
    (("<function=", "<tool_call>"), "qwen3_coder"),
    (("<tool_call>",), "hermes"),
)


def told_by(template: str | None) -> str:
    """The name of the form that a chat template teaches its model. Raises UserError when it shows none."""
    for words, name in TELLS:
        if template and all(word in template for word in words):
            return name
    raise UserError("--tool-call-parser auto: the chat template shows no form of calls that is known; name one")


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


def value_of(found: re.Match[str], schema: dict[str, Any]) -> Any:
    """A parameter's value, written without quotes: text where it or the tool's schema says so, else JSON if it is."""
    text, said = found["value"], found.groupdict().get("text")
    if said in ("true", "string"):
        return text
    own = (schema.get("properties") or {}).get(found["key"])
    return text_value(text, own if said is None and isinstance(own, dict) else {})


def text_value(text: str, schema: dict[str, Any]) -> Any:
    """A value written without quotes: text where its schema says so, else JSON if it is."""
    if schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
