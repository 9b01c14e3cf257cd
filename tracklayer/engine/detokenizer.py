"""Tokens to text as they come: whole characters only, stop strings and patterns found at the exact token.

`Detokenizer` turns ids into text without decoding all of it again, `ByteDetokenizer` without decoding at all where
tokens are bytes; `StopMatcher` watches that text.
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tracklayer.engine.tokenizer import BytePieces, TextTokenizer
from tracklayer.errors import UserError

CONTEXT_TOKENS = 5  # prompt tokens decoded along with the first output, so that spacing is that of a continuation
UNFINISHED = "\ufffd"
HOLD_TOKENS = 32  # after so many without new text the window slides: bounded work for bytes that never become any
REGEX_WINDOW = 4096  # characters in which a pattern is looked for; keeps the cost per token constant
REGEX_SECONDS = 0.1
REGEX_BYTES = 256
REGEX_REPEATS = 10_000


class ByteDetokenizer:
    """`Detokenizer` for a byte-level vocabulary, whose tokens' bytes only have to be put in a row."""

    text = ""

    def __init__(self, pieces: BytePieces, prompt_ids: Sequence[int], *, skip_special: bool) -> None:
        self._pieces, self._skip = pieces, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.push(prompt_ids[-CONTEXT_TOKENS:])  # it may end inside a character
        self.text = ""

    def push(self, token_ids: Sequence[int], *, last: bool = False) -> str:
        """Take tokens, return the new text (may be empty). `last`: nothing follows, emit what is left."""
        new = self._decoder.decode(self._pieces.join(token_ids, skip_special=self._skip), last)
        self.text += new
        return new


def detokenizer_of(
    tokenizer: TextTokenizer, prompt_ids: Sequence[int], *, skip_special: bool, spaces_between: bool = True
) -> ByteDetokenizer | Detokenizer:
    """What turns a sequence's output into text as it comes."""
    if tokenizer.byte_pieces is not None:
        return ByteDetokenizer(tokenizer.byte_pieces, prompt_ids, skip_special=skip_special)
    return Detokenizer(tokenizer, prompt_ids, skip_special=skip_special, spaces_between=spaces_between)


class Detokenizer:
    """Incremental decoding of one sequence. `text` only ever grows, and never ends inside a character.

    The ids since a safe border, and some before it for the spacing, are decoded; what goes beyond the text that is
    out already is new.
    """

    def __init__(
        self, tokenizer: TextTokenizer, prompt_ids: Sequence[int], *, skip_special: bool, spaces_between: bool = True
    ) -> None:
        self._decode = tokenizer.decode
        self._options = {"skip_special_tokens": skip_special, "spaces_between": spaces_between}
        self._window = list(prompt_ids[-CONTEXT_TOKENS:])
        self._border = len(self._window)  # ids before it are context only
        self._out = len(self._decode(self._window, **self._options))  # characters of the window's text that are out
        self._silent = 0  # tokens since the last new text
        self.text = ""

    def push(self, token_ids: Sequence[int], *, last: bool = False) -> str:
        """Take tokens, return the new text (may be empty). `last`: nothing follows, emit what is left."""
        stuck = self._silent > HOLD_TOKENS
        self._window.extend(token_ids)
        if len(self._window) == self._border:
            return ""
        whole = self._decode(self._window, **self._options)
        finished = last or stuck or not whole.endswith(UNFINISHED)
        # decoders with byte fallback show a whole run of bytes as U+FFFD until its last character is complete
        safe = len(whole) if finished else len(whole.rstrip(UNFINISHED))
        new = whole[self._out : safe]
        self._out = max(self._out, safe)
        self.text += new
        self._silent = 0 if new else self._silent + len(token_ids)
        if finished and (new or stuck):
            self._window = self._window[self._border :]
            self._border = len(self._window)
            self._out = len(self._decode(self._window, **self._options))
        return new


@dataclass(frozen=True, slots=True)
class Match:
    """What ended the text: the stop string or pattern as the request gave it, and where it begins in the text."""

    stop: str
    position: int


class StopMatcher:
    """Finds stop strings and patterns in text that grows; also says how much of the text is safe to show already."""

    def __init__(self, stops: Sequence[str], patterns: Sequence[str]) -> None:
        self._stops = stops
        self._patterns = [(p, compile_pattern(p)) for p in patterns]
        self._seen = 0

    def find(self, text: str) -> Match | None:
        """The earliest stop string that ends in text not looked at before, else the first pattern that matches."""
        seen, self._seen = self._seen, len(text)
        found = [Match(s, at) for s in self._stops if (at := text.find(s, max(0, seen - len(s) + 1))) >= 0]
        if found:
            return min(found, key=lambda m: m.position)
        base = max(0, len(text) - REGEX_WINDOW)
        for source, pattern in self._patterns:
            hit = _search(pattern, source, text, base, partial=False)
            if hit is not None:
                return Match(source, hit.start())
        return None

    def safe_length(self, text: str) -> int:
        """Characters of `text` that no later match can take away."""
        safe = len(text)
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), 0, -1):
                if text.endswith(stop[:size]):
                    safe = min(safe, len(text) - size)
                    break
        base = max(0, len(text) - REGEX_WINDOW)
        for source, pattern in self._patterns:
            hit = _search(pattern, source, text, base, partial=True)
            if hit is not None:
                safe = min(safe, hit.start())
        return safe


def compile_pattern(source: str) -> Any:
    """A compiled stop pattern. Raises UserError for one that is too long or not a regular expression."""
    import regex

    if len(source.encode()) > REGEX_BYTES:
        raise UserError(f"stop_regex takes at most {REGEX_BYTES} bytes, got {len(source.encode())}")
    # the compiler writes every repeat that must be there out: a few nested counts would fill the memory
    repeats = math.prod(max(1, int(count)) for count in re.findall(r"\{\s*(\d+)", source))
    if repeats > REGEX_REPEATS:
        raise UserError(f"stop_regex {source!r} asks for {repeats} repeats, {REGEX_REPEATS} are allowed; use * or +")
    try:
        return regex.compile(source)
    except (regex.error, RecursionError, OverflowError, ValueError) as error:
        raise UserError(f"stop_regex {source!r} is not a regular expression: {error}") from error


def _search(pattern: Any, source: str, text: str, start: int, *, partial: bool) -> Any:
    try:
        return pattern.search(text, start, partial=partial, timeout=REGEX_SECONDS)
    except TimeoutError:
        raise UserError(f"stop_regex {source!r} takes too long to search; simplify it") from None
