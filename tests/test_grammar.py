"""Structured output: what a random model writes under a grammar parses and fits, however the step was run."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import wait

import numpy as np
import pytest
import torch
from engine_tools import Result, make_core, request
from server_fakes import byte_level_tokenizer
from tiny import save

from tracklayer.engine import grammar
from tracklayer.engine.grammar import Grammars, check_grammar
from tracklayer.engine.tokenizer import load_tokenizer
from tracklayer.errors import CapacityError, CheckpointError, UserError
from tracklayer.runner.sampling import apply_mask
from tracklayer.types import SamplingParams

VOCAB = 400
NAME = {"type": "string", "maxLength": 6}
SCHEMAS = [
    {"type": "boolean"},
    {"type": "null"},
    {"enum": ["red", "green", 3]},
    {"const": {"a": [1, 2]}},
    {"type": "integer", "minimum": -5, "maximum": 37},
    {"type": "string", "pattern": "^[a-c]{2,4}$"},
    NAME,
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "object", "properties": {"a": {"type": "boolean"}, "b": NAME}, "required": ["a", "b"],
     "additionalProperties": False},
    {"anyOf": [{"type": "boolean"}, {"type": "object", "properties": {"x": NAME}, "required": ["x"],
                                     "additionalProperties": False}]},
    {"$defs": {"t": {"type": "object", "properties": {"v": {"enum": [1, 2]}}, "required": ["v"],
                     "additionalProperties": False}},
     "type": "array", "items": {"$ref": "#/$defs/t"}, "minItems": 1, "maxItems": 2},
    {"type": "object", "properties": {"k": {"enum": ["é", "日本"]}}, "required": ["k"], "additionalProperties": False},
]  # fmt: skip


def fits(value, schema, root=None):
    """Whether a value fits a schema: the keywords of SCHEMAS, by hand."""
    root = root or schema
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rsplit("/", 1)[1]]
    if "anyOf" in schema:
        return any(fits(value, one, root) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    kind = {"boolean": bool, "null": type(None), "integer": int, "string": str, "array": list, "object": dict}
    if type(value) is not kind[schema["type"]]:
        return False
    if isinstance(value, dict):
        named = schema["properties"]
        return set(schema["required"]) <= set(value) <= set(named) and all(
            fits(v, named[k], root) for k, v in value.items()
        )
    if isinstance(value, list):
        return schema["minItems"] <= len(value) <= schema["maxItems"] and all(
            fits(v, schema["items"], root) for v in value
        )
    if isinstance(value, str):
        return bool(re.search(schema.get("pattern", ""), value)) and len(value) <= schema.get("maxLength", len(value))
    return not isinstance(value, int) or schema.get("minimum", value) <= value <= schema.get("maximum", value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save("qwen3_moe", folder, 0, vocab_size=VOCAB, max_position_embeddings=1024)
    byte_level_tokenizer()._hf.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(str(folder))


def ask(rid, tokenizer, *, tokens=120, seed=0, return_logprob=False, top_logprobs_num=0, **sampling):
    """A request under a grammar; white space is made unlikely, or a random model would write little else."""
    space = {i: -20.0 for i in range(VOCAB) if not tokenizer.token_text(i).strip()}
    return request(
        rid, [5, 6, 7, len(rid)], tokens=tokens, seed=seed, stop_token_ids=frozenset(tokenizer.eos_token_ids),
        sampling={"temperature": 1.0, "logit_bias": space, **sampling}, return_logprob=return_logprob,
        top_logprobs_num=top_logprobs_num,
    )  # fmt: skip


def drive(core, requests, between=lambda core, step: None):
    """Step until all requests have ended; grammars are waited for, `between(core, step)` runs after each step."""
    results = {r.rid: Result() for r in requests}
    for one in requests:
        core.add(one)
    for step in range(3000):
        wait([future for _, future in core.compiling.values()], timeout=30)
        for output in core.step():
            results[output.rid].add(output)
        between(core, step)
        if all(r.finish for r in results.values()) and not core.has_work:
            core.scheduler.check_integrity()
            assert not core.states and not core.compiling
            return results
    raise AssertionError(f"still running: {[rid for rid, r in results.items() if not r.finish]}")


def text_of(tokenizer, result):
    return tokenizer.decode(result.tokens)


@pytest.mark.parametrize("depth", [0, 1])
def test_replies_fit_their_schemas_and_rows_without_one_are_untouched(folder, tokenizer, depth):
    """All schemas in one batch with free rows; with overlap and without; routes are whole."""
    core = make_core(folder, max_total_tokens=4000, max_running_requests=20)
    core.depth = depth
    free = [request(f"free{i}", [9, 8, 7, i], sampling={"temperature": 1.0}, seed=i) for i in range(2)]
    alone = {f.rid: drive(core, [f])[f.rid].tokens for f in free}
    asked = [ask(f"s{i}", tokenizer, json_schema=json.dumps(s), seed=i) for i, s in enumerate(SCHEMAS)]
    results = drive(core, [*asked, *free])
    for i, schema in enumerate(SCHEMAS):
        result = results[f"s{i}"]
        assert result.finish.type == "stop", (schema, text_of(tokenizer, result))
        assert fits(json.loads(text_of(tokenizer, result)), schema), (schema, text_of(tokenizer, result))
        assert len(result.routes) == 4 + len(result.tokens) - 1
    assert {rid: results[rid].tokens for rid in alone} == alone


def test_overlap_gives_the_tokens_and_log_probabilities_of_no_overlap(folder, tokenizer):
    found = []
    for depth in (0, 1):
        core = make_core(folder)
        core.depth = depth
        results = drive(core, [ask("a", tokenizer, regex="[a-f]{3,9}!", return_logprob=True)])
        found.append(
            (results["a"].tokens, results["a"].output_logprobs.logprobs.tolist(), results["a"].routes.tolist())
        )
    assert found[0] == found[1]
    assert all(p <= 0 for p in found[0][1])


def test_older_structural_tags_are_understood(folder, tokenizer):
    core = make_core(folder)
    tag = {"structures": [{"begin": "<f=a>", "schema": {"type": "boolean"}, "end": "</f>"}], "triggers": ["<f="]}
    only = {220: -20.0, **{t: 30.0 for t in tokenizer.encode("<f=")}}
    result = drive(core, [ask("a", tokenizer, tokens=60, structural_tag=json.dumps(tag), logit_bias=only)])["a"]
    calls = re.findall("<f=(.*?)</f>", text_of(tokenizer, result), re.S)
    assert calls and all(re.fullmatch(r"a>\s*(true|false)\s*", call) for call in calls)


GRAMMARS = [
    ("regex", "(yes|no) [0-9]{3}", r"(yes|no) [0-9]{3}"),
    ("ebnf", 'root ::= "<" word ">"\nword ::= [a-z] [a-z] [a-z]', r"<[a-z]{3}>"),
    ("json_schema", "$$ANY$$", None),
    (
        "structural_tag",
        json.dumps({"type": "structural_tag", "format": {"type": "tag", "begin": "<f>", "end": "</f>", "content": {
            "type": "json_schema", "json_schema": {"type": "boolean"}}}}),
        r"<f>\s*(true|false)\s*</f>",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "pattern"), GRAMMARS, ids=[k for k, _, _ in GRAMMARS])
def test_each_kind_of_grammar(folder, tokenizer, kind, text, pattern):
    core = make_core(folder)
    result = drive(core, [ask("a", tokenizer, tokens=200, **{kind: text})])["a"]
    if pattern is not None:
        assert re.fullmatch(pattern, text_of(tokenizer, result)), text_of(tokenizer, result)
        assert result.finish.type == "stop"
    elif result.finish.type == "stop":
        json.loads(text_of(tokenizer, result))


def test_the_end_of_a_grammar_ends_a_request_that_ignores_eos(folder, tokenizer):
    core = make_core(folder)
    one = ask("a", tokenizer, regex="ab", ignore_eos=True)
    one.stop_token_ids = frozenset()
    result = drive(core, [one])["a"]
    assert text_of(tokenizer, result) == "ab" and result.finish.type == "stop"
    assert result.finish.matched == result.tokens[-1] in {*core.info.eos_token_ids, *tokenizer.eos_token_ids}


def test_min_new_tokens_holds_as_long_as_the_grammar_has_more_to_give(folder, tokenizer):
    core = make_core(folder)
    long, short = (
        ask("long", tokenizer, regex="[a-z]{1,60}", min_new_tokens=12),
        ask("short", tokenizer, regex="no", min_new_tokens=12),
    )
    results = drive(core, [long, short])
    assert len(results["long"].tokens) >= 12
    assert text_of(tokenizer, results["short"]) == "no" and results["short"].finish.type == "stop"


def test_a_preempted_request_goes_on_in_its_grammar(folder, tokenizer):
    """Sent back to the queue in the middle, its tokens and rows are those of the undisturbed run."""

    def retract(core, step):
        if step in (4, 9):
            core.drain()
            core.scheduler.retract_all()
            core.save_preempted()

    def asked():
        return [ask(f"p{i}", tokenizer, regex="[a-z]{20,30}[0-9]", seed=i) for i in range(3)]

    plain, disturbed = drive(make_core(folder), asked()), drive(make_core(folder), asked(), retract)
    for rid, result in disturbed.items():
        assert result.retractions == 2 and result.tokens == plain[rid].tokens
        assert re.fullmatch("[a-z]{20,30}[0-9]", text_of(tokenizer, result))
        assert np.array_equal(result.routes, plain[rid].routes)


def test_log_probabilities_are_of_what_the_grammar_allows(folder, tokenizer):
    core = make_core(folder)
    result = drive(core, [ask("a", tokenizer, regex="x", return_logprob=True, top_logprobs_num=5)])["a"]
    assert len(result.tokens) == 2  # x, then one of two ends
    logprobs = result.output_logprobs
    assert abs(logprobs.logprobs[0]) < 1e-6 and np.isneginf(logprobs.top_logprobs[0, 1:]).all()
    assert set(logprobs.top_ids[1, :2]) == {*core.info.eos_token_ids, *tokenizer.eos_token_ids}
    assert (
        abs(np.exp(logprobs.top_logprobs[1, :2]).sum() - 1) < 1e-5 and np.isneginf(logprobs.top_logprobs[1, 2:]).all()
    )


BAD = [
    ("regex", "(a", "not closed"),
    ("ebnf", "root ::= foo", "foo"),
    ("json_schema", '{"type": ', "JSON"),
    ("json_schema", '{"type": "nonsense"}', "nonsense"),
    ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "minimum"),
    ("structural_tag", '{"type": "structural_tag"}', "structural"),
    ("structural_tag", "[", "structural_tag"),
    ("structural_tag", '{"structures": [1]}', "structures"),
    ("structural_tag", '{"structures": [{"begin": "<f>"}], "triggers": ["<f"]}', "structural_tag"),
]


def test_bad_grammars_are_refused_by_name_and_hurt_nobody(folder, tokenizer):
    core = make_core(folder)
    bad = [ask(f"bad{i}", tokenizer, **{kind: text}) for i, (kind, text, _) in enumerate(BAD)]
    results = drive(core, [*bad, ask("good", tokenizer, regex="ok")])
    for i, (kind, _, word) in enumerate(BAD):
        finish = results[f"bad{i}"].finish
        assert (finish.type, finish.status) == ("abort", 400), finish
        assert finish.message.startswith(kind) and word in finish.message and ".cc" not in finish.message, (
            finish.message
        )
    assert text_of(tokenizer, results["good"]) == "ok"


def test_sizes_are_bounded_before_anything_is_compiled():
    with pytest.raises(UserError, match="at most 65536 characters"):
        check_grammar(SamplingParams(regex="a" * 70000))
    with pytest.raises(UserError, match="nests 5001 brackets"):
        check_grammar(SamplingParams(json_schema='{"items":' * 5000 + "{}" + "}" * 5000))
    check_grammar(SamplingParams(json_schema="{}"))


def test_one_text_is_compiled_once_and_a_slow_one_is_given_up(folder, monkeypatch):
    grammars = Grammars(str(folder), VOCAB, ())
    sizes = []
    for text in ("a+", "a+", "b+"):
        grammars.compile(SamplingParams(regex=text)).result(30)
        sizes.append(grammars._compiler.get_cache_size_bytes())
    assert 0 < sizes[0] == sizes[1] < sizes[2]
    gate = threading.Event()
    monkeypatch.setattr(grammar, "COMPILE_S", 0.2)
    monkeypatch.setattr(grammars, "_compile", lambda kind, text: gate.wait(30))
    answers = [grammars.compile(SamplingParams(regex=text)) for text in ("b", "c", "d")]
    assert grammars.compile(SamplingParams(regex="c")) is answers[1]
    monkeypatch.setattr(grammar, "MOST_WAITING", 3)
    with pytest.raises(CapacityError, match="ask again later"):
        grammars.compile(SamplingParams(regex="e"))
    errors = [type(a.exception(timeout=10)).__name__ for a in answers]
    gate.set()
    assert not grammars._waiting
    grammars.close()
    assert errors == ["UserError", "UserError", "CapacityError"]  # the third never had a worker


def test_no_tokenizer_is_said_clearly(tmp_path):
    with pytest.raises(CheckpointError, match="--tokenizer-path"):
        Grammars(str(tmp_path), VOCAB, ()).compile(SamplingParams(regex="a")).result(30)


def test_abort_while_the_grammar_is_compiled(folder, tokenizer, monkeypatch):
    core = make_core(folder)
    gate = threading.Event()
    compile_now = core.grammars._compile
    monkeypatch.setattr(core.grammars, "_compile", lambda *a: gate.wait(30) and compile_now(*a))
    core.add(ask("a", tokenizer, regex="a"))
    assert not core.has_work
    core.abort("a")
    (output,) = core.step()
    gate.set()
    assert output.finish.type == "abort" and not core.compiling


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 97])
def test_mask_bits(vocabulary):
    """Against Python integers; rows that are not named stay as they are."""
    generator = np.random.default_rng(vocabulary)
    logits = torch.randn(3, vocabulary)
    mask = generator.integers(-(2**31), 2**31, (2, -(-vocabulary // 32))).astype(np.int32)
    out = apply_mask(logits, np.array([0, 2]), mask)
    assert torch.equal(out[1], logits[1])
    for g, n in enumerate((0, 2)):
        for v in range(vocabulary):
            allowed = int(mask[g, v // 32]) >> (v % 32) & 1
            assert out[n, v] == (logits[n, v] if allowed else float("-inf"))
