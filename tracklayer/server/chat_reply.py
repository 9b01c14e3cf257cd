"""A chat reply's text as reasoning, answer and calls of tools; the same for whole replies and streams."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tracklayer.errors import UserError
from tracklayer.server.protocol import ChatBody
from tracklayer.server.reasoning_parsers import REASONING_FORMATS, ReasoningParser, reasoning_tokens
from tracklayer.server.service import Service
from tracklayer.server.tool_formats import TOOL_FORMATS, ToolCall, merged
from tracklayer.server.tool_parsers import ForcedParser, ToolParser, forced_schema
from tracklayer.types import EngineRequest

PROMPT_END_TOKENS = 16  # enough to hold the marker with which a template opens or closes the reasoning


@dataclass(slots=True)
class Part:
    """What is new in a reply; of a stream, calls may be pieces."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class ReplyReader:
    """Reads one reply as it grows. Without parsers its content is its text."""

    def __init__(self, body: ChatBody, service: Service, request: EngineRequest) -> None:
        self._read = 0
        self._held = "" if body.stream_reasoning is False else None
        self._reasoning: ReasoningParser | None = None
        form = service.config.reasoning_parser
        # what a grammar binds from its first token on holds no reasoning; a structural tag may leave room for it
        bound = request.sampling.constrained and not request.sampling.structural_tag
        if form and body.separate_reasoning is not False and not bound:
            tail = service.tokenizer().decode(request.input_ids[-PROMPT_END_TOKENS:], skip_special_tokens=False)
            self._reasoning = ReasoningParser(REASONING_FORMATS[form], tail)
        self._thought = ""
        self._service = service
        self._tools: ToolParser | ForcedParser | None = None
        if is_forced(body):
            self._tools = ForcedParser(body.tools or [], stream=bool(body.stream))
        elif reads_tools(body, service):
            form_of_calls = TOOL_FORMATS[service.tool_call_parser or ""]
            self._tools = ToolParser(form_of_calls, body.tools or [], stream=bool(body.stream))
        self.num_calls = 0

    def read(self, text: str, *, last: bool) -> Part:
        """What is new in the reply `text` (all of it so far); `last`: it is over."""
        new, self._read = text[self._read :], max(self._read, len(text))
        part = Part()
        reasoning, answer = self._reasoning.feed(new) if self._reasoning else ("", new)
        if last and self._reasoning:
            more = self._reasoning.flush()
            reasoning, answer = reasoning + more[0], answer + more[1]
        self._thought += reasoning
        if self._held is not None:  # reasoning in one piece, when the answer begins or all is over
            self._held += reasoning
            reasoning = ""
            if answer or last:
                reasoning, self._held = self._held, ""
        part.reasoning = reasoning
        part.content, part.calls = self._tools.feed(answer) if self._tools else (answer, [])
        if last and self._tools:
            content, calls = self._tools.flush()
            part.content, part.calls = part.content + content, part.calls + calls
        part.calls = merged(part.calls)
        self.num_calls += sum(call.name is not None for call in part.calls)
        return part

    def reasoning_tokens(self, ids: list[int]) -> int:
        """How many of these output ids are reasoning; 0 where reasoning is not told apart."""
        if self._reasoning is None:
            return 0

        def encode(text: str) -> list[int]:
            return self._service.tokenizer().encode(text, add_special_tokens=False)

        form = REASONING_FORMATS[self._service.config.reasoning_parser or ""]
        count = reasoning_tokens(form, ids, self._reasoning.opened, encode)
        # markers that are no tokens of their own may have melted into their neighbours: then by the text
        lost = (count == len(ids) and self._reasoning.over) or (count == 0 and bool(self._thought))
        return len(encode(self._thought)) if lost else count


def is_forced(body: ChatBody) -> bool:
    """Whether the reply must be calls of tools."""
    return body.tool_choice == "required" or isinstance(body.tool_choice, dict)


def reads_tools(body: ChatBody, service: Service) -> bool:
    return bool(body.tools) and body.tool_choice != "none" and service.tool_call_parser is not None


def reply_params(body: ChatBody, service: Service) -> dict[str, Any]:
    """sampling_params that the parsing of the reply needs: a grammar for forced calls, markers kept in the text.

    Raises UserError for a tool_choice that can not be.
    """
    if is_forced(body):
        several = body.parallel_tool_calls is not False
        return {"json_schema": json.dumps(forced_schema(body.tools or [], _named(body), several=several))}
    if body.tool_choice not in (None, "auto", "none"):
        raise UserError(f"tool_choice must be auto, none, required or a function, got {body.tool_choice!r:.80}")
    forms: list[Any] = []
    if reads_tools(body, service):
        forms.append(TOOL_FORMATS[service.tool_call_parser or ""])
    if service.config.reasoning_parser and body.separate_reasoning is not False:
        forms.append(REASONING_FORMATS[service.config.reasoning_parser])
    return {"skip_special_tokens": False} if any(form.special for form in forms) else {}


def _named(body: ChatBody) -> str | None:
    """The tool that tool_choice names; None for any."""
    if not isinstance(body.tool_choice, dict):
        return None
    function = body.tool_choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if body.tool_choice.get("type", "function") != "function" or not isinstance(name, str):
        raise UserError(f"tool_choice must be {{type: function, function: {{name}}}}, got {body.tool_choice!r:.80}")
    return name
