"""Calls whose arguments are elements within elements: values by structure and schema, whole and streamed alike."""

from __future__ import annotations

import json
import random
import time

import pytest
from test_reply_parsers import pieces, run
from test_tool_pieces import joined

from tracklayer.server.tool_formats import MINIMAX_M3, TOOL_FORMATS
from tracklayer.server.tool_nested import MAX_DEPTH, take_element
from tracklayer.server.tool_parsers import ToolParser

FORM = TOOL_FORMATS["minimax-m3"]
STRINGS = {"type": "array", "items": {"type": "string"}}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "n": {"type": "number"},
        "tags": STRINGS,
        "place": {"type": "object", "properties": {"zip": {"type": "string"}, "tags": STRINGS}},
        "more": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}
TOOLS = [{"function": {"name": "f", "parameters": SCHEMA}}, {"function": {"name": "bare"}}]


def written(value, tag=None):
    """A value as the family's template writes it; numbers and the like as JSON."""
    if isinstance(value, dict):
        inner = "".join(written(each, name) for name, each in value.items())
    elif isinstance(value, list):
        inner = "".join(written(each, "item") for each in value)
    else:
        inner = value if isinstance(value, str) else json.dumps(value)
    return inner if tag is None else f"{MINIMAX_M3}<{tag}>{inner}{MINIMAX_M3}</{tag}>"


def call(body, name="f"):
    m = MINIMAX_M3
    return f'{m}<tool_call>\n{m}<invoke name="{name}">{body}{m}</invoke>\n{m}</tool_call>'


def read(reply, parts=None):
    text, calls = run(ToolParser(FORM, TOOLS, stream=parts is not None), parts or [reply])
    found = joined(calls) if parts is not None else [(c.name, c.arguments) for c in calls]
    return text, [(name, json.loads(arguments)) for name, arguments in found]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"name": "7", "n": 7, "tags": ["1", "a <b> c"], "place": {"zip": "012", "tags": ["x"]}, "more": {"k": "5"}},
        {"name": "a\n b ", "n": 1.5},
        {"name": "", "tags": [], "place": {}},
        {"place": {"place": {"place": 3}}, "name": "same tags within"},
        {"unknown": [[1, 2], [3]], "other": {"a": [{"b": None}, {"b": True}], "c": "text"}},
        {"name": '"}] </invoke> ]<] <name>'},
    ],
)
def test_values_come_back_whole_and_streamed(arguments):
    reply = "so " + call(written(arguments))
    want = ("so", [("f", arguments)])
    assert read(reply) == want
    generator = random.Random(1)
    for parts in ([reply], list(reply), *(pieces(reply, generator) for _ in range(40))):
        assert read(reply, parts) == want, parts


def test_tools_without_a_schema_and_repeated_tags():
    body = written({"a": 1}) + written({"b": "x"})
    assert read(call(body, "bare"))[1] == [("bare", {"a": 1, "b": "x"})]
    twice = written(written({"k": 1}) + written({"k": 2}), "a")
    assert read(call(twice, "bare"))[1] == [("bare", {"a": {"k": [1, 2]}})]


@pytest.mark.parametrize(
    "body",
    [
        "junk",
        f"{MINIMAX_M3}</name>",
        f"{MINIMAX_M3}<name>a{MINIMAX_M3}</n>",
        f"{MINIMAX_M3}<name>a",
        written({"name": "a"}) + "junk",
        written(1, "a").join([f"{MINIMAX_M3}<a>" * (MAX_DEPTH + 1), f"{MINIMAX_M3}</a>" * (MAX_DEPTH + 1)]),
    ],
)
def test_what_is_not_whole_elements_stays_text(body):
    reply = call(body)
    assert read(reply) == (reply, [])
    text, calls = run(ToolParser(FORM, TOOLS, stream=True), list(reply))
    assert all(name == "f" and json.loads(arguments) in ({}, {"name": "a"}) for name, arguments in joined(calls))
    assert "junk" not in body or "junk" in text  # a stream that told the name still shows what it could not read


def test_long_lists_take_time_that_grows_with_their_length():
    many = {"tags": ["x"] * 20_000}
    reply = call(written(many))
    began = time.perf_counter()
    assert read(reply) == ("", [("f", many)])
    assert read(reply, [reply[i : i + 4000] for i in range(0, len(reply), 4000)]) == ("", [("f", many)])
    assert time.perf_counter() - began < 20


def test_an_element_is_taken_when_it_is_whole():
    text = written({"a": {"a": 1}})
    assert take_element(text + "rest", MINIMAX_M3) == ("a", written({"a": 1}), len(text))
    assert [take_element(text[:i], MINIMAX_M3) for i in range(len(text))] == [None] * len(text)
