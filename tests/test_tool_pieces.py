"""Calls of tools in streams: name first, then arguments piece by piece; joined they are those of the whole reply."""

from __future__ import annotations

import json
import random

import pytest
from test_reply_parsers import ARGS_PARIS, JSON_BERLIN, JSON_PARIS, PARIS, TOOLS, TWO_CALLS, pieces, run, tools

from tracklayer.server.tool_formats import TOOL_FORMATS
from tracklayer.server.tool_parsers import ForcedParser, ToolParser
from tracklayer.server.tool_pieces import HEAD_CHARACTERS, JsonEnd


def joined(calls):
    """Calls from their pieces; a piece without a name belongs to the call before, whose name must have come first."""
    found = []
    for call in calls:
        if call.name is not None:
            assert call.id
            found.append([call.name, call.arguments])
        else:
            assert call.id is None and call.wire(3) == {"index": 3, "function": {"arguments": call.arguments}}
            found[-1][1] += call.arguments
    return [tuple(call) for call in found]


def streamed(name, parts):
    text, calls = run(ToolParser(TOOL_FORMATS[name], TOOLS, stream=True), parts)
    return text, [(n, json.loads(a)) for n, a in joined(calls)]


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_two_calls_in_every_form_and_every_cut(name):
    reply = "I look it up. \n" + TWO_CALLS[name]
    expected = tools(name, [reply])
    assert len(expected[1]) == 2
    for parts in ([reply], list(reply), *(pieces(reply, random.Random(i)) for i in range(60))):
        assert streamed(name, parts) == expected, parts


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_the_name_comes_before_the_arguments_are_whole(name):
    """Character by character: the first call's name is told while nine tenths of its arguments are still to come."""
    parser, told = ToolParser(TOOL_FORMATS[name], TOOLS, stream=True), []
    reply = TWO_CALLS[name]
    for at, character in enumerate(reply):
        told += [(at, call) for call in parser.feed(character)[1]]
    first, arguments = told[0][0], [at for at, call in told if call.arguments]
    assert told[0][1].name == "weather" and not told[0][1].arguments
    assert first < reply.index("Paris") < reply.index("2", first)
    many = {"parameter": 2}.get("parameter") if TOOL_FORMATS[name].parameter else 5
    assert len(arguments) >= many, "the arguments came in one piece"


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_text_without_a_call_and_calls_of_unknown_tools_are_as_in_whole_replies(name):
    begin, call = TOOL_FORMATS[name].begin, TWO_CALLS[name]
    for reply in ("", " ", "plain\n", "a < b", f"x {begin[:-1]}", "{not json", call.replace("weather", "rain")):
        for parts in ([reply], list(reply)):
            assert streamed(name, parts) == tools(name, [reply])


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_a_broken_call_whose_name_can_not_be_read_stays_text(name):
    form = TOOL_FORMATS[name]
    reply = f'so: {form.begin}we{{ather "x" {form.end or ""} tail'
    for parts in ([reply], list(reply)):
        assert streamed(name, parts) == (reply, [])


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_random_mixtures_lose_nothing_and_never_raise(name):
    """Whatever the mixture and the cut: as the whole reply where that holds readable calls alone, and never less."""
    form = TOOL_FORMATS[name]
    words = [form.begin, form.end or "", *form.drops, TWO_CALLS[name], JSON_PARIS, " ", "\n", "a", "{", form.begin[:3]]
    generator = random.Random(name)
    for _ in range(200):
        reply = "".join(generator.choices(words, k=generator.randint(0, 7)))
        results = []
        for parts in ([reply], pieces(reply, generator), list(reply)):
            text, calls = run(ToolParser(form, TOOLS, stream=True), parts)
            results.append((text, joined(calls)))
        assert results[0] == results[1] == results[2], reply
        text, calls = results[0]
        whole_text, whole_calls = run(ToolParser(form, TOOLS), [reply])
        assert len(calls) >= len(whole_calls)
        for word in ("a", "Paris"):
            kept = text.count(word) + sum(arguments.count(word) for _, arguments in calls)
            in_whole = whole_text.count(word) + sum(call.arguments.count(word) for call in whole_calls)
            assert kept >= min(in_whole, reply.count(word)) or "name" in whole_text, reply


def test_arguments_cut_short_are_what_was_written():
    text, calls = run(ToolParser(TOOL_FORMATS["hermes"], TOOLS, stream=True), ["<tool_call>" + JSON_PARIS[:50]])
    assert (text, joined(calls)) == ("", [("weather", JSON_PARIS[33:50])])
    coder = TWO_CALLS["qwen3_coder"]
    text, calls = run(
        ToolParser(TOOL_FORMATS["qwen3_coder"], TOOLS, stream=True), [coder[: coder.index("<parameter=days>")]]
    )
    assert (text, joined(calls)) == ("", [("weather", '{"city": "Paris"}')])


def test_details():
    tricky = {"city": 'a "}] \\" </b> { \\', "days": 1}
    for body in (json.dumps({"name": "weather", "arguments": tricky}), f"weather{json.dumps(tricky)}"):
        for parts in ([body], list(body)):
            assert streamed("mistral", ["[TOOL_CALLS]", *parts]) == ("", [("weather", tricky)])
    late = '{"arguments": {"city": "Paris", "days": 2}, "name": "weather"}'
    assert streamed("hermes", list(f"<tool_call>{late}</tool_call>")) == ("", [PARIS])
    after = JSON_PARIS[:-1] + ', "id": "x}"}'
    assert streamed("hermes", list(f"<tool_call>{after}</tool_call> done")) == (" done", [PARIS])
    assert streamed("llama3", list(JSON_PARIS)) == ("", [PARIS])
    assert streamed("llama3", list('{"answer": 4}')) == ('{"answer": 4}', [])
    assert streamed("glm45", list("<tool_call>now</tool_call>"))[1] == [("now", {})]
    assert streamed("qwen3_coder", list("<tool_call>\n<function=now>\n</function>\n</tool_call>"))[1] == [("now", {})]
    long = "<tool_call>" + "[" * (3 * HEAD_CHARACTERS) + "</tool_call>"
    assert streamed("hermes", [long]) == (long, [])
    kimi = run(ToolParser(TOOL_FORMATS["kimi_k2"], TOOLS, stream=True), list(TWO_CALLS["kimi_k2"]))[1]
    assert [c.id for c in kimi if c.name] == ["functions.weather:0", "functions.weather:1"]


def test_forced_calls_in_pieces():
    reply = f"[{JSON_BERLIN}, {JSON_PARIS}]"
    for parts in ([reply], list(reply)):
        text, calls = run(ForcedParser(TOOLS, stream=True), parts)
        assert text == "" and [n for n, _ in joined(calls)] == ["weather", "weather"]
        assert json.loads(joined(calls)[1][1]) == json.loads(ARGS_PARIS)
    assert run(ForcedParser(TOOLS, stream=True), ['[{"name": "wea'])[0] == '[{"name": "wea'
    assert joined(run(ForcedParser(TOOLS, stream=True), [f"[{JSON_PARIS}"[:45]])[1])[0][0] == "weather"


def test_the_end_of_json_is_found_whatever_the_cut():
    texts = ['{"a": [1, {"b": "}"}], "c": "\\"}\\\\"}', "{}", '{"x": "\\u007d"}']
    for text in texts:
        for cut in range(len(text) + 1):
            scan = JsonEnd()
            found = scan.find(text[:cut])
            assert found == (None if cut < len(text) else len(text))
            if found is None:
                assert scan.find(text[cut:] + " } tail") == len(text) - cut
