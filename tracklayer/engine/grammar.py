"""Structured output: texts of grammars become compiled ones, and these the token masks of a step.

A grammar is compiled on a worker thread, once per text. A request's `GrammarState` lives on the engine's thread: it
advances with each committed token, and says which tokens may come next.
"""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from tracklayer.errors import CapacityError, CheckpointError, TracklayerError, UserError
from tracklayer.types import GRAMMARS, EngineRequest, SamplingParams, Share

ANY_JSON = "$$ANY$$"  # SGLang's name for "any JSON value"
MOST_CHARACTERS = 1 << 16
DEEPEST = 100  # nested brackets: the compiler recurses
COMPILE_S = 30.0
CACHE_BYTES = 256 << 20
WORKERS = 2
MOST_WAITING = 256  # grammars that are being compiled or wait for it
_BRACKETS = dict.fromkeys("([{", 1) | dict.fromkeys(")]}", -1)


def grammar_of(params: SamplingParams) -> tuple[str, str] | None:
    """(kind, text) of the one grammar that a request may have; None without one."""
    return next(((kind, text) for kind in GRAMMARS if (text := getattr(params, kind))), None)


def check_grammar(params: SamplingParams) -> None:
    """What can be said of a grammar without compiling it. Raises UserError."""
    grammar = grammar_of(params)
    if grammar is None:
        return
    kind, text = grammar
    if find_spec("xgrammar") is None:
        raise UserError(f"{kind} needs the package xgrammar: pip install 'tracklayer[serve]'")
    if len(text) > MOST_CHARACTERS:
        raise UserError(f"{kind} takes at most {MOST_CHARACTERS} characters, got {len(text)}")
    depth = deepest = 0
    for character in text:
        depth += _BRACKETS.get(character, 0)
        deepest = max(deepest, depth)
    if deepest > DEEPEST:
        raise UserError(f"{kind} nests {deepest} brackets deep, at most {DEEPEST} are taken; flatten it")


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled grammar, and int32 words whose bits allow tokens (None: it allows all that the grammar does)."""

    grammar: Any
    allowed_W: np.ndarray | None = None


class Grammars:
    """Compiles grammars for one tokenizer. `stop_token_ids` end a grammar that is complete.

    The tokenizer is read when the first grammar comes. Thread-safe.
    """

    def __init__(self, tokenizer_path: str, vocab_size: int, stop_token_ids: tuple[int, ...]) -> None:
        self._path = tokenizer_path
        self._vocab_size = vocab_size
        self._stops = stop_token_ids
        self._lock = threading.Lock()
        self._loading = threading.Lock()  # held while the tokenizer is read; the engine's thread never waits for it
        self._compiler: Any = None
        self._no_control_W: np.ndarray | None = None
        self._waiting: dict[tuple[str, str], Future[Compiled]] = {}
        self._workers: ThreadPoolExecutor | None = None

    def compile(self, params: SamplingParams) -> Future[Compiled]:
        """The compiled grammar of a request, through a future that ends within COMPILE_S; equal ones share it.

        Raises CapacityError when MOST_WAITING wait. The future's errors: UserError naming what is wrong or that it
        took too long, CapacityError when others hold all workers, CheckpointError without a tokenizer.
        """
        grammar = grammar_of(params)
        assert grammar is not None, "no grammar to compile"
        answer: Future[Compiled] = Future()
        with self._lock:
            if grammar in self._waiting:
                return self._waiting[grammar]
            if len(self._waiting) >= MOST_WAITING:
                raise CapacityError(f"{MOST_WAITING} grammars wait to be compiled; ask again later")
            self._waiting[grammar] = answer
            self._workers = self._workers or ThreadPoolExecutor(WORKERS, thread_name_prefix="grammar")
        answer.add_done_callback(lambda _: self._waiting.pop(grammar))
        work = self._workers.submit(self._compile, *grammar)
        timer = threading.Timer(COMPILE_S, self._give_up, (answer, work, grammar[0]))
        timer.daemon = True
        timer.start()
        work.add_done_callback(lambda done: self._pass_on(done, answer, timer))
        return answer

    def _pass_on(self, done: Future[Any], answer: Future[Any], timer: threading.Timer) -> None:
        timer.cancel()
        error = CapacityError("the grammar was not compiled") if done.cancelled() else done.exception()
        with self._lock:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(done.result())

    def _give_up(self, answer: Future[Any], work: Future[Any], kind: str) -> None:
        error: TracklayerError = UserError(f"{kind} was not compiled within {COMPILE_S:.0f} s; give a simpler one")
        with self._lock:
            if work.running():
                if not answer.done():
                    answer.set_exception(error)
                return
        work.cancel()

    def _compile(self, kind: str, text: str) -> Compiled:
        import xgrammar

        compiler = self._ready()
        try:
            if kind == "json_schema":
                any_json = text == ANY_JSON
                grammar = compiler.compile_builtin_json_grammar() if any_json else compiler.compile_json_schema(text)
                return Compiled(grammar, self._no_control_W)
            if kind == "regex":
                return Compiled(compiler.compile_regex(text))
            if kind == "ebnf":
                return Compiled(compiler.compile_grammar(xgrammar.Grammar.from_ebnf(text)))
            return Compiled(compiler.compile_structural_tag(_current_tag(text)))
        except (RuntimeError, ValueError, TypeError) as error:
            raise UserError(f"{kind} is not a grammar that can be used: {_plain(error)}") from error

    def _ready(self) -> Any:
        """The compiler; made by the first caller."""
        import xgrammar
        from transformers import AutoTokenizer

        with self._loading:
            if self._compiler is None:
                try:
                    tokenizer = AutoTokenizer.from_pretrained(self._path, local_files_only=True)
                except (OSError, ValueError, KeyError, ImportError) as error:
                    raise CheckpointError(
                        f"structured output needs the tokenizer, and none could be read from {self._path!r} "
                        f"({str(error).splitlines()[0]}); give --tokenizer-path DIR"
                    ) from error
                own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
                stops = sorted({*self._stops, *own})
                info = xgrammar.TokenizerInfo.from_huggingface(
                    tokenizer, vocab_size=self._vocab_size, stop_token_ids=stops
                )
                self._no_control_W = _without_control(info.decoded_vocab)
                self._compiler = xgrammar.GrammarCompiler(info, max_threads=WORKERS, cache_limit_bytes=CACHE_BYTES)
            return self._compiler

    def close(self) -> None:
        if self._workers is not None:
            self._workers.shutdown(wait=False, cancel_futures=True)


def _without_control(vocabulary: list[bytes]) -> np.ndarray:
    """int32 words whose bits allow the tokens without control characters other than line ends.

    JSON never needs these, and the compiler lets them into strings of bounded length, where JSON forbids them.
    """
    allowed = [not any(byte < 32 and byte not in b"\r\n" for byte in token) for token in vocabulary]
    padded = np.ones(-(-len(allowed) // 32) * 32, bool)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.int32)


def _current_tag(text: str) -> str:
    """A structural tag in the form with `format`; the older one with `structures` and `triggers` is turned into it.

    Raises ValueError.
    """
    tag = json.loads(text)
    if not isinstance(tag, dict):
        raise ValueError("a structural tag is a JSON object")
    if "structures" not in tag:
        return text
    if not isinstance(tag["structures"], list) or not all(isinstance(s, dict) for s in tag["structures"]):
        raise ValueError("structures must be a list of objects with begin, schema and end")
    tags = [
        {
            "begin": one.get("begin"),
            "content": {"type": "json_schema", "json_schema": one.get("schema", {})},
            "end": one.get("end"),
        }
        for one in tag["structures"]
    ]
    form = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
    return json.dumps({"type": "structural_tag", "format": form})


def _plain(error: Exception) -> str:
    """The compiler's message without its time and source line."""
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error)).strip() or type(error).__name__


class GrammarState:
    """How far one request's output is in its grammar."""

    def __init__(self, compiled: Compiled, request: EngineRequest) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled.grammar)
        self._allowed_W = compiled.allowed_W
        self._stops = np.array(sorted({*self._matcher.stop_token_ids, *request.stop_token_ids}), np.int64)
        # without any EOS token the end of the grammar itself must end the request
        if len(self._matcher.stop_token_ids) == 0:
            self._matcher = xgrammar.GrammarMatcher(compiled.grammar, terminate_without_stop_token=True)
        self._least = request.sampling.min_new_tokens
        self._count = 0

    def accept(self, token: int) -> bool:
        """Advance by an output token; False when the grammar does not allow it (its logits were not numbers)."""
        self._count += 1
        return self.finished or bool(self._matcher.accept_token(token))

    @property
    def finished(self) -> bool:
        return bool(self._matcher.is_terminated())

    def fill(self, mask_NW: np.ndarray, row: int) -> None:
        """Write the bits of the tokens that may come next. Below min_new_tokens stop tokens go, unless nothing else
        is left: the grammar wins."""
        self._matcher.fill_next_token_bitmask(mask_NW, row)
        if self._allowed_W is not None:
            mask_NW[row] &= self._allowed_W
        if self._count < self._least and len(self._stops):
            kept_W = mask_NW[row].copy()
            bits = np.left_shift(np.uint32(1), (self._stops & 31).astype(np.uint32))
            np.bitwise_and.at(kept_W.view(np.uint32), self._stops >> 5, ~bits)
            if kept_W.any():
                mask_NW[row] = kept_W


class StepMask:
    """The masks of a step's rows with a grammar; filled when asked, which is while the device works."""

    def __init__(self, states: dict[str, GrammarState], vocab_size: int) -> None:
        self._states = states
        self._words = -(-vocab_size // 32)

    def fill(self, shares: list[Share]) -> tuple[np.ndarray, np.ndarray]:
        """(indices int64 [G] of the shares with a grammar, mask int32 [G, ceil(V / 32)]): bit v % 32 of word v // 32
        allows token v."""
        rows_G = np.array([n for n, share in enumerate(shares) if share.rid in self._states], np.int64)
        mask_GW = np.full((len(rows_G), self._words), -1, np.int32)
        for g, n in enumerate(rows_G):
            self._states[shares[n].rid].fill(mask_GW, g)
        return rows_G, mask_GW
