"""Reasoning apart from the answer: one table of formats, one incremental parser."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tracklayer.server.markers import Cutter
from tracklayer.server.tool_formats import KIMI_K3_CHANNELS


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family marks its reasoning.

    opens: the reply begins inside the reasoning even if the prompt does not end with `begin`.
    cuts: what also ends the reasoning, and stays in the answer. drops: headers in the answer that say nothing.
    repeats: reasoning may come again after some answer.
    inline: reasoning stays in the answer, with `begin`, which the prompt holds, before it.
    special: the markers are special tokens, which must be kept in the text.
    """

    begin: str = "<think>"
    end: str = "</think>"
    opens: bool = False
    cuts: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    repeats: bool = False
    inline: bool = False
    special: bool = False


THINK = ReasoningFormat()
OPENED = ReasoningFormat(opens=True)
REASONING_FORMATS = {
    "deepseek-r1": OPENED,
    "deepseek-v3": THINK,
    "deepseek-v4": THINK,
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>", special=True),
    "glm45": ReasoningFormat(cuts=("<tool_call>",)),
    "gpt-oss": ReasoningFormat(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        cuts=("<|channel|>commentary",),
        drops=("<|start|>assistant", "<|channel|>final<|message|>"),
        repeats=True,
        special=True,
    ),
    "hunyuan": ReasoningFormat(cuts=("<tool_calls>",)),
    "interns1": THINK,
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
    "kimi_k2": ReasoningFormat(cuts=("<|tool_calls_section_begin|>",)),
    "kimi_k3": ReasoningFormat(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        cuts=("<|open|>tools<|sep|>",),
        drops=KIMI_K3_CHANNELS,
        special=True,
    ),
    "ling3": ReasoningFormat(cuts=("<tool_call>",)),
    "mimo": THINK,
    "minimax": OPENED,
    "minimax-append-think": ReasoningFormat(opens=True, inline=True),
    "minimax-m3": ReasoningFormat("<mm:think>", "</mm:think>", drops=("</mm:think>",)),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", special=True),
    "nemotron_3": ReasoningFormat(cuts=("<tool_call>",)),
    "qwen3": ReasoningFormat(cuts=("<tool_call>",)),
    "qwen3-thinking": OPENED,
    "step3": OPENED,
    "step3p5": OPENED,
}


def reasoning_tokens(form: ReasoningFormat, ids: list[int], inside: bool, encode: Callable[[str], list[int]]) -> int:
    """How many of a reply's tokens are reasoning, its markers counted, found by the markers' own tokens.

    inside: the reply begins in the reasoning. encode: text to ids, no special tokens added.
    """
    begin, end = encode(form.begin), encode(form.end)
    cuts = [encode(cut) for cut in form.cuts]
    count, at = 0, 0
    while True:
        if not inside:
            begun = _find(ids, begin, at)
            if begun is None:
                return count
            at = begun
        stops = [(i, i) for cut in cuts if (i := _find(ids, cut, at)) is not None]  # a cut belongs to the answer
        ended = _find(ids, end, at)
        stops += [(ended, ended + len(end))] if ended is not None else []
        if not stops:
            return count + len(ids) - at
        _, stop = min(stops)
        count, at, inside = count + stop - at, stop, False
        if not form.repeats:
            return count


def _find(ids: list[int], wanted: list[int], start: int) -> int | None:
    """Where `wanted` stands in `ids`, from `start` on."""
    while True:
        try:
            start = ids.index(wanted[0], start)
        except ValueError:
            return None
        if ids[start : start + len(wanted)] == wanted:
            return start
        start += 1


class ReasoningParser:
    """Splits one reply into reasoning and answer. `prompt_end`: the last text of the prompt.

    White space around the reasoning is dropped; every other character of the reply comes out once, in order.
    `opened`: the reply begins in the reasoning.
    """

    def __init__(self, form: ReasoningFormat, prompt_end: str = "") -> None:
        self._form = form
        tail = prompt_end.rstrip()
        self.opened = tail.endswith(form.begin) or (form.opens and not tail.endswith(form.end))
        self._inside = self.opened
        self._over = tail.endswith(form.end)
        self._cutter = Cutter((form.begin, form.end, *form.cuts, *form.drops))
        self._space = ""
        self._fresh = True  # nothing but white space came in this part

    def feed(self, text: str) -> tuple[str, str]:
        """(new reasoning, new answer) after more text."""
        if self._form.inline:
            lead = self._form.begin if self._fresh and text else ""
            self._fresh = self._fresh and not text
            return "", lead + text
        return self._take(self._cutter.feed(text))

    @property
    def over(self) -> bool:
        """Whether some reasoning has ended."""
        return self._over

    def flush(self) -> tuple[str, str]:
        """The rest, at the end of the reply."""
        return self._take(self._cutter.flush())

    def _take(self, pieces: Iterable[tuple[str, bool]]) -> tuple[str, str]:
        reasoning, answer = "", ""
        for piece, marker in pieces:
            if not marker:
                if self._inside:
                    reasoning += self._trimmed(piece)
                else:
                    answer += self._led(piece)
            elif self._inside and piece != self._form.begin:
                self._inside, self._over, self._fresh, self._space = False, True, True, ""
                answer += piece if piece in self._form.cuts else ""
            elif piece == self._form.begin and (self._form.repeats or not self._over):
                self._inside, self._fresh = True, True
            elif not (self._inside or piece in self._form.drops or (piece == self._form.end and self._form.repeats)):
                answer += self._led(piece)
        return reasoning, answer

    def _trimmed(self, piece: str) -> str:
        """A piece of reasoning without white space at the start; that at the end waits for what follows."""
        piece = self._space + (piece.lstrip() if self._fresh else piece)
        self._fresh = self._fresh and not piece
        shown = piece.rstrip()
        self._space = piece[len(shown) :]
        return shown

    def _led(self, piece: str) -> str:
        """A piece of the answer; white space directly after the reasoning is dropped."""
        if self._over and self._fresh:
            piece = piece.lstrip()
            self._fresh = not piece
        return piece
