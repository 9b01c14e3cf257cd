"""Reasoning and tool calls in replies: each family's form, and the same result however the text is cut."""

from __future__ import annotations

import json
import random

import pytest

from tracklayer.errors import UserError
from tracklayer.server.reasoning_parsers import REASONING_FORMATS, ReasoningParser, reasoning_tokens
from tracklayer.server.tool_formats import TOOL_FORMATS, told_by
from tracklayer.server.tool_parsers import ForcedParser, ToolParser, forced_schema

TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}}}}},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip
PARIS, BERLIN = ("weather", {"city": "Paris", "days": 2}), ("weather", {"city": "7", "days": 1})
JSON_PARIS = '{"name": "weather", "arguments": {"city": "Paris", "days": 2}}'
JSON_BERLIN = '{"name": "weather", "parameters": {"city": "7", "days": 1}}'
ARGS_PARIS, ARGS_BERLIN = '{"city": "Paris", "days": 2}', '{"city": "7", "days": 1}'


def xml(key, end, city, days):
    return f"{key.format('city')}{city}{end}\n{key.format('days')}{days}{end}\n"


ASKED = (("Paris", 2), ("7", 1))
GLM_ARGS = [xml("<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>", *a) for a in ASKED]
GLM = [f"<tool_call>weather\n{args}</tool_call>" for args in GLM_ARGS]
CODER_ARGS = [xml("<parameter={}>\n", "\n</parameter>", *a) for a in ASKED]
CODER = [f"<tool_call>\n<function=weather>\n{args}</function>\n</tool_call>" for args in CODER_ARGS]
INVOKE = ['<invoke name="weather">\n' + xml('<parameter name="{}">', "</parameter>", *a) + "</invoke>\n" for a in ASKED]
TAG = "\uff5cDSML\uff5c"
DSML = "<\uff5cDSML\uff5c{0}>\n" + "\n".join(
    f'<{TAG}invoke name="weather">\n<{TAG}parameter name="city" string="true">{city}</{TAG}parameter>\n'
    f'<{TAG}parameter name="days" string="false">{days}</{TAG}parameter>\n</{TAG}invoke>'
    for city, days in ASKED
) + "\n</\uff5cDSML\uff5c{0}>"  # fmt: skip
M3 = "]<]minimax[>["
M3_CALLS = [
    f'{M3}<invoke name="weather">\n{M3}<city>{city}{M3}</city>\n{M3}<days>{days}{M3}</days>{M3}</invoke>\n'
    for city, days in ASKED
]
TWO_CALLS = {
    "hermes": f"<tool_call>\n{JSON_PARIS}\n</tool_call>\n<tool_call>\n{JSON_BERLIN}\n</tool_call>",
    "qwen": f"<tool_call>{JSON_PARIS}</tool_call><tool_call>{JSON_BERLIN}</tool_call>",
    "qwen25": f"<tool_call>\n{JSON_PARIS}\n</tool_call>\n<tool_call>\n{JSON_BERLIN}",  # cut before the last marker
    "mistral": f"[TOOL_CALLS] [{JSON_PARIS}, {JSON_BERLIN}]",
    "llama3": f"<|python_tag|>{JSON_PARIS}; {JSON_BERLIN}",
    "deepseekv3": "<\uff5ctool▁calls▁begin\uff5c>" + "\n".join(
        f"<\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>weather\n```json\n{a}\n```<\uff5ctool▁call▁end\uff5c>"
        for a in (ARGS_PARIS, ARGS_BERLIN)) + "<\uff5ctool▁calls▁end\uff5c>",
    "deepseekv31": "<\uff5ctool▁calls▁begin\uff5c>" + "".join(
        f"<\uff5ctool▁call▁begin\uff5c>weather<\uff5ctool▁sep\uff5c>{a}<\uff5ctool▁call▁end\uff5c>"
        for a in (ARGS_PARIS, ARGS_BERLIN))
        + "<\uff5ctool▁calls▁end\uff5c>",
    "kimi_k2": "<|tool_calls_section_begin|>" + "".join(
        f"<|tool_call_begin|>functions.weather:{i}<|tool_call_argument_begin|>{a}<|tool_call_end|>"
        for i, a in enumerate((ARGS_PARIS, ARGS_BERLIN))) + "<|tool_calls_section_end|>",
    **dict.fromkeys(("glm", "glm45"), "\n".join(GLM)),
    "glm47": "".join(GLM).replace("\n", ""),
    "hunyuan": "<tool_calls>\n" + "\n".join(GLM).replace("weather\n", "weather<tool_sep>\n") + "\n</tool_calls>",
    "deepseekv32": DSML.format("function_calls"),
    "deepseekv4": DSML.format("tool_calls"),
    **dict.fromkeys(("mimo", "step3p5"), "".join(c.replace(">\n", ">") for c in CODER)),
    "qwen3_coder": "\n".join(CODER),
    "minimax-m2": f"<minimax:tool_call>\n{''.join(INVOKE)}</minimax:tool_call>\n",
    "minimax-m3": f"{M3}<tool_call>\n{''.join(M3_CALLS)}{M3}</tool_call>",
    "ling3": "\n".join(GLM).replace("weather\n", "weather"),
    "kimi_k3": "<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>" + "".join(
        f'<|open|>call tool="weather" index="{i}"<|sep|><|open|>argument key="city" type="string"<|sep|>{city}'
        f'<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>{days}<|close|>argument<|sep|>'
        "<|close|>call<|sep|>"
        for i, (city, days) in enumerate(ASKED, 1)) + "<|close|>tools<|sep|><|close|>message<|sep|>",
    "step3": "<\uff5ctool_calls_begin\uff5c>\n" + "\n".join(
        '<\uff5ctool_call_begin\uff5c>function<\uff5ctool_sep\uff5c><steptml:invoke name="weather">\n'
        + xml('<steptml:parameter name="{}">', "</steptml:parameter>", *a)
        + "</steptml:invoke><\uff5ctool_call_end\uff5c>" for a in ASKED) + "\n<\uff5ctool_calls_end\uff5c>",
    "gpt-oss": "".join(
        f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{a}<|call|>"
        for a in (ARGS_PARIS, ARGS_BERLIN)),
}  # fmt: skip


def pieces(text, generator):
    cuts = sorted(generator.sample(range(len(text) + 1), min(len(text), generator.randint(0, 12))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def run(parser, parts):
    """(text or reasoning, the other) of all parts; calls as (name, arguments)."""
    first, second = parser.feed("")
    for part in parts:
        a, b = parser.feed(part)
        first, second = first + a, second + b
    a, b = parser.flush()
    return first + a, second + b


def tools(name, parts):
    text, calls = run(ToolParser(TOOL_FORMATS[name], TOOLS), parts)
    assert len({call.id for call in calls}) == len(calls)
    return text, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_two_calls_after_text_in_each_form_and_every_cut(name):
    reply = "I look it up. \n" + TWO_CALLS[name]
    expected = ("I look it up.", [PARIS, BERLIN])
    assert tools(name, [reply]) == expected
    assert tools(name, reply) == expected  # character by character
    generator = random.Random(name)
    for _ in range(60):
        assert tools(name, pieces(reply, generator)) == expected


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_text_without_a_call_stays_as_it_is(name):
    form = TOOL_FORMATS[name]
    begin = form.begin[:-1]
    for reply in ("", " ", "plain\n", "a < b <tool", f"x {begin}", f"x {begin} y\n\n", "{not json", "ends in <"):
        generator = random.Random(reply)
        for _ in range(20):
            assert tools(name, pieces(reply, generator)) == (reply, []), reply


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_a_broken_call_stays_text(name):
    form = TOOL_FORMATS[name]
    reply = f'so: {form.begin}we{{ather "x" {form.end or ""} tail'
    for parts in ([reply], list(reply)):
        assert tools(name, parts) == (reply, [])


def test_details_of_forms():
    assert tools("mistral", ['[TOOL_CALLS]weather{"city": "Paris", "days": 2}'])[1] == [PARIS]
    assert tools("mistral", ['[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 2}'])[1] == [PARIS]
    assert tools("llama3", [JSON_PARIS]) == ("", [PARIS])  # without the marker
    assert tools("llama3", ['{"answer": 4}']) == ('{"answer": 4}', [])
    assert tools("hermes", ["<tool_call>" + JSON_PARIS.replace("Paris", "a </b> {") + "</tool_call>"])[1] == [
        ("weather", {"city": "a </b> {", "days": 2})
    ]
    assert tools("glm45", ["<tool_call>now</tool_call>"])[1] == [("now", {})]
    _, calls = run(ToolParser(TOOL_FORMATS["kimi_k2"], TOOLS), [TWO_CALLS["kimi_k2"]])
    assert [c.id for c in calls] == ["functions.weather:0", "functions.weather:1"]
    loose = f'<{TAG}tool_calls><{TAG}invoke name="x">{{"a": 1}}</{TAG}invoke></{TAG}tool_calls>'
    assert tools("deepseekv4", [loose]) == ("", [("x", {"a": 1})])
    deep = "<tool_call>" + "[" * 100000 + "</tool_call>"
    assert tools("hermes", [deep]) == (deep, [])


REPLIES = [
    ("qwen3", "", "<think>\nhm, 1 < 2\n</think>\n\nYes. \n", ("hm, 1 < 2", "Yes. \n")),
    ("qwen3", "assistant\n<think>\n", "hm</think>Yes", ("hm", "Yes")),
    ("qwen3", "<think>\n\n</think>\n\n", "Yes <think>", ("", "Yes <think>")),
    ("qwen3", "", " no thought ", ("", " no thought ")),
    ("qwen3", "", "<think>a<tool_call>b", ("a", "<tool_call>b")),
    ("deepseek-r1", "", "hm\n\n</think>\nYes", ("hm", "Yes")),
    ("deepseek-r1", "", "<think>hm</think>Yes </think>", ("hm", "Yes </think>")),
    ("deepseek-r1", "", "cut short ", ("cut short", "")),
    ("glm45", "", "\n<think>x</think>y", ("x", "\ny")),
    ("kimi", "", "◁think▷x◁/think▷y", ("x", "y")),
    ("mistral", "", "[THINK]x [y][/THINK]z", ("x [y]", "z")),
    ("minimax", "", "x\n</think>\n\ny", ("x", "y")),
    ("gpt-oss", "", "<|channel|>analysis<|message|>x y<|end|><|start|>assistant<|channel|>final<|message|>z",
     ("x y", "z")),
    ("gpt-oss", "", "<|channel|>final<|message|>z", ("", "z")),
    ("gemma4", "", "<|channel>thought\nhm <|<channel|>Yes", ("hm <|", "Yes")),
    ("gemma4", "", "<|channel>thought\n<channel|>Yes", ("", "Yes")),
    ("gemma4", "", "no thought", ("", "no thought")),
    ("nemotron_3", "assistant\n<think>\n", "hm\n</think>\n\nYes", ("hm", "Yes")),
    ("nemotron_3", "<think></think>", "Yes", ("", "Yes")),
    ("nemotron_3", "<think>\n", "a<tool_call>b", ("a", "<tool_call>b")),
    ("ling3", "", "<think>a<tool_call>b", ("a", "<tool_call>b")),
    ("hunyuan", "", "<think>a</think>b", ("a", "b")),
    ("step3p5", "", "a</think>b", ("a", "b")),
    ("minimax-append-think", "<think>\n", "a\n</think>\n\nb", ("", "<think>a\n</think>\n\nb")),
    ("minimax-append-think", "", "", ("", "")),
    ("deepseek-v4", "<think>", "a</think>b", ("a", "b")),
    ("minimax-m3", "", "<mm:think>a <think> b</mm:think>c", ("a <think> b", "c")),
    ("minimax-m3", "", "</mm:think>c", ("", "c")),  # replies without thought may begin so
    ("kimi_k3", "<|open|>think<|sep|>", "a<|close|>think<|sep|><|open|>response<|sep|>b<|close|>response<|sep|>"
     "<|close|>message<|sep|>", ("a", "b")),
    ("kimi_k3", "", "<|open|>think<|sep|>a<|open|>tools<|sep|>c", ("a", "<|open|>tools<|sep|>c")),
    ("kimi_k2", "<think>", "x<|tool_calls_section_begin|>", ("x", "<|tool_calls_section_begin|>")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "prompt", "reply", "expected"), REPLIES)
def test_reasoning_whole_and_cut(name, prompt, reply, expected):
    form = REASONING_FORMATS[name]
    assert run(ReasoningParser(form, prompt), [reply]) == expected
    assert run(ReasoningParser(form, prompt), reply) == expected
    generator = random.Random(reply)
    for _ in range(60):
        assert run(ReasoningParser(form, prompt), pieces(reply, generator)) == expected


@pytest.mark.parametrize("name", sorted(REASONING_FORMATS))
def test_random_mixtures_of_markers_read_alike_whole_and_cut(name):
    form = REASONING_FORMATS[name]
    words = [form.begin, form.end, *form.cuts, *form.drops, " ", "\n", "a", "<", "<|", form.begin[:4], form.end[:-1]]
    generator = random.Random(name)
    for _ in range(200):
        reply = "".join(generator.choices(words, k=generator.randint(0, 9)))
        whole = run(ReasoningParser(form), [reply])
        assert run(ReasoningParser(form), pieces(reply, generator)) == whole, reply
        assert run(ReasoningParser(form), reply) == whole, reply


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_random_mixtures_of_calls_read_alike_whole_and_cut(name):
    form = TOOL_FORMATS[name]
    words = [form.begin, form.end or "", *form.drops, TWO_CALLS[name], JSON_PARIS, " ", "\n", "a", "{", form.begin[:3]]
    generator = random.Random(name)
    for _ in range(200):
        reply = "".join(generator.choices(words, k=generator.randint(0, 7)))
        whole = tools(name, [reply]) if "kimi" not in name else run(ToolParser(form, TOOLS), [reply])[0]
        for parts in (pieces(reply, generator), list(reply)):
            cut = tools(name, parts) if "kimi" not in name else run(ToolParser(form, TOOLS), parts)[0]
            assert cut == whole, reply


def test_forced_calls():
    schema = forced_schema(TOOLS, None, several=True)
    assert "maxItems" not in schema and len(schema["items"]["anyOf"]) == 2
    assert forced_schema(TOOLS, "now", several=True)["maxItems"] == 1
    text, calls = run(ForcedParser(TOOLS), list(f"[{JSON_BERLIN}]"))
    assert text == "" and [(c.name, json.loads(c.arguments)) for c in calls] == [BERLIN]
    assert run(ForcedParser(TOOLS), ['[{"name": "wea'])[0] == '[{"name": "wea'
    with pytest.raises(UserError, match="'rain'"):
        forced_schema(TOOLS, "rain", several=True)
    with pytest.raises(UserError, match="there are none"):
        forced_schema([], None, several=True)
    with pytest.raises(UserError, match=r"function\.name"):
        forced_schema([{"type": "function"}], None, several=True)
    other = [{"function": {"name": n, "parameters": {"$defs": {"x": {"const": n}}}}} for n in "ab"]
    with pytest.raises(UserError, match="differently"):
        forced_schema(other, None, several=True)


# ids as a tokenizer gives them: markers are tokens of their own, gpt-oss's begin with three
MARKERS = {"<think>": [1], "</think>": [2], "<tool_call>": [3], "<|end|>": [4], "<|channel|>commentary": [5, 6],
           "<|channel|>analysis<|message|>": [5, 7, 8], "◁think▷": [1], "◁/think▷": [2],
           "<|tool_calls_section_begin|>": [9]}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "inside", "ids", "count"),
    [
        ("qwen3", False, [1, 20, 21, 2, 30, 31], 4),
        ("qwen3", True, [20, 21, 2, 30], 3),
        ("qwen3", False, [30, 31], 0),
        ("qwen3", True, [20, 21], 2),
        ("qwen3", True, [], 0),
        ("qwen3", True, [20, 3, 30, 2], 1),  # a call ends it
        ("qwen3", False, [1, 20, 2, 30, 1, 31, 2], 3),  # once only
        ("gpt-oss", False, [5, 7, 8, 20, 4, 30, 5, 7, 8, 21, 22, 4, 31], 11),
        ("gpt-oss", False, [5, 7, 30], 0),  # the marker's first tokens alone
        ("gpt-oss", False, [5, 7, 8, 20, 5, 6, 30], 4),
        ("deepseek-r1", True, [20, 2, 30], 2),
    ],
)
def test_reasoning_tokens_are_counted_by_their_markers(name, inside, ids, count):
    assert reasoning_tokens(REASONING_FORMATS[name], ids, inside, MARKERS.__getitem__) == count


def test_a_chat_template_tells_its_form():
    """Each form's own example is what a template that teaches it holds."""
    same = {"qwen": "hermes", "qwen25": "hermes", "mimo": "qwen3_coder", "step3p5": "qwen3_coder", "glm": "glm45",
            "glm47": "glm45", "ling3": "glm45"}  # fmt: skip
    for name, example in TWO_CALLS.items():
        assert told_by(f"{{% if tools %}}{example}{{% endif %}}") == same.get(name, name)
    for template in (None, "", "{{ messages }}"):
        with pytest.raises(UserError, match="name one"):
            told_by(template)
