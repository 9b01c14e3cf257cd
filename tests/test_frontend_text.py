"""Incremental decoding and stop matching against decoding the whole text at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_fakes import byte_fallback_tokenizer, byte_level_tokenizer

from tracklayer.engine.detokenizer import (
    HOLD_TOKENS,
    ByteDetokenizer,
    Detokenizer,
    StopMatcher,
    compile_pattern,
    detokenizer_of,
)
from tracklayer.engine.tokenizer import load_tokenizer
from tracklayer.errors import CheckpointError, UserError

LEVEL, FALLBACK = byte_level_tokenizer(), byte_fallback_tokenizer()


def by_decoding(tokenizer, prompt, skip=True):
    return Detokenizer(tokenizer, prompt, skip_special=skip)


def by_bytes(tokenizer, prompt, skip=True):
    detokenizer = detokenizer_of(tokenizer, prompt, skip_special=skip)
    assert isinstance(detokenizer, ByteDetokenizer)
    return detokenizer


BOTH = pytest.mark.parametrize("make", [by_decoding, by_bytes])


def run(tokenizer, prompt, ids, sizes=(1,), skip=True, make=by_decoding):
    detokenizer, shown, at, i = make(tokenizer, prompt, skip), [], 0, 0
    while at < len(ids):
        size = sizes[i % len(sizes)]
        i += 1
        last = at + size >= len(ids)
        shown.append(detokenizer.push(ids[at : at + size], last=last))
        at += size
    return detokenizer.text, shown


@BOTH
@given(text=st.text(max_size=60), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_real_text_comes_back_whole_in_any_chunking(make, text, sizes):
    ids = LEVEL.encode(text, add_special_tokens=False)
    got, shown = run(LEVEL, LEVEL.encode("User: "), ids, sizes, make=make)
    assert got == text == "".join(shown)


@BOTH
def test_a_long_run_of_characters_cut_by_every_push(make):
    """Each push ends inside a character for longer than the window holds: there is new text all the same."""
    text = "0" + chr(0x10000) * 40
    got, shown = run(LEVEL, LEVEL.encode("User: "), LEVEL.encode(text, add_special_tokens=False), [2], make=make)
    assert got == text == "".join(shown)


@given(st.text(alphabet="the cats!ab中🙂é", max_size=40))
@settings(max_examples=100, deadline=None)
def test_byte_fallback_text_continues_the_prompt(text):
    prompt = FALLBACK.encode("hello")
    ids = FALLBACK.encode(text, add_special_tokens=False)
    whole = FALLBACK.decode([*prompt, *ids])
    assert FALLBACK.decode(prompt) + run(FALLBACK, prompt, ids)[0] == whole


@given(st.text(alphabet="中🙂é👩‍🚀x", min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_no_chunk_ends_inside_a_character(text):
    for tokenizer, make in ((LEVEL, by_decoding), (LEVEL, by_bytes), (FALLBACK, by_decoding)):
        ids = tokenizer.encode(text, add_special_tokens=False)
        _, shown = run(tokenizer, tokenizer.encode("a"), ids, make=make)
        assert not any("\ufffd" in chunk for chunk in shown)


@given(st.lists(st.integers(0, 399), max_size=60), st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_ids_decode_to_the_end(ids, skip):
    """Garbage bytes too: text only grows, the window stays small, nothing is lost at the end."""
    detokenizer = Detokenizer(LEVEL, [], skip_special=skip)
    before = ""
    for i, token in enumerate(ids):
        detokenizer.push([token], last=i == len(ids) - 1)
        assert detokenizer.text.startswith(before)
        assert len(detokenizer._window) <= 2 * (HOLD_TOKENS + 2)
        before = detokenizer.text
    whole = LEVEL.decode(ids, skip_special_tokens=skip)
    clean = "\ufffd" not in whole
    assert not clean or detokenizer.text == whole
    assert run(LEVEL, [], ids, skip=skip, make=by_bytes)[0] == whole


def test_a_prompt_may_end_inside_a_character():
    ids = LEVEL.encode("\U00010000", add_special_tokens=False)
    assert len(ids) > 1 and run(LEVEL, ids[:1], ids[1:], make=by_bytes)[0] == "\U00010000"


def test_only_byte_level_vocabularies_are_read_as_bytes():
    assert isinstance(detokenizer_of(FALLBACK, [], skip_special=True), Detokenizer)


@given(
    st.text(alphabet="abc", max_size=30),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
)
@settings(max_examples=300, deadline=None)
def test_stops_end_where_a_naive_search_says(text, stops, sizes):
    """Fed piece by piece, the first piece with any stop in the text so far ends it, at its earliest position."""
    matcher, at, i = StopMatcher(stops, ()), 0, 0
    while at < len(text):
        at = min(len(text), at + sizes[i % len(sizes)])
        i += 1
        hits = [text.find(s, 0, at) for s in stops if s in text[:at]]
        match = matcher.find(text[:at])
        if hits:
            assert match is not None and match.position == min(hits)
            return
        assert match is None
        safe = matcher.safe_length(text[:at])
        future = [j for j in range(at) if any(s.startswith(text[j:at]) for s in stops)]
        assert safe == min(future, default=at)


def test_patterns_match_across_pieces_and_hold_back_their_beginning():
    matcher = StopMatcher((), [r"\d{3}-\d{4}"])
    text = "call 55"
    assert matcher.find(text) is None and matcher.safe_length(text) == 5
    text += "5-1234 now"
    match = matcher.find(text)
    assert match is not None and (match.stop, match.position) == (r"\d{3}-\d{4}", 5)


@pytest.mark.parametrize("source", ["(", "[", "a{2,1}", "(?P<x", "x" * 300, "(?:(?:a{99}){99}){2,}"])
def test_bad_patterns_are_refused(source):
    with pytest.raises(UserError, match="stop_regex"):
        compile_pattern(source)


def test_exploding_pattern_is_an_error_not_a_hang():
    matcher = StopMatcher((), [r"(a|a|aa)+$|(x+x+)+y"])
    with pytest.raises(UserError, match="too long"):
        matcher.find("x" * 3000)


def test_chat_template_and_its_errors():
    ids = LEVEL.chat_ids([{"role": "user", "content": [{"type": "text", "text": "hi"}]}])
    assert LEVEL.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(UserError, match="at least one message"):
        LEVEL.chat_ids([])
    with pytest.raises(UserError, match="image_url"):
        LEVEL.chat_ids([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    with pytest.raises(UserError, match="no chat template"):
        FALLBACK.chat_ids([{"role": "user", "content": "hi"}])


def test_missing_tokenizer_names_the_remedy(tmp_path):
    with pytest.raises(CheckpointError, match="--skip-tokenizer-init"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("path", ["Qwen/Qwen3-30B-A3B", "/nope/model"])
def test_a_tokenizer_is_never_asked_of_a_hub(path):
    with pytest.raises(CheckpointError, match=f"'{path}' is not a directory"):
        load_tokenizer(path)
