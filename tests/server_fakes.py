"""Stand-ins for front-end tests: an engine that needs no model, and small real tokenizers.

FakeEngine implements EngineClient on a thread of its own. Tokens come from a script (a function of the request), or
from arithmetic on seed and position; routes and log-probabilities are functions of (token, position), so that a test
can say what they must be without asking the engine.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tracklayer.engine.client import EngineInfo
from tracklayer.engine.tokenizer import TextTokenizer
from tracklayer.errors import UserError
from tracklayer.types import EngineRequest, FinishReason, RequestOutput, TokenLogprobs

LAYERS, MOE_LAYERS, EXPERTS, TOP_K = 4, (1, 2, 3), 8, 2

CORPUS = [
    "The capital of France is Paris. The quick brown fox jumps over the lazy dog.",
    "Über die Straße läuft ein Bär. 中文字符 日本語 👩‍🚀 emoji 🙂🙃 and more text.",
    "def main():\n    return {'a': 1, 'b': [2, 3]}\n\nUser: hello\nAssistant: hi there",
] * 4

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level_tokenizer() -> TextTokenizer:
    """Byte-level BPE (GPT-2, Qwen, Llama 3 kind) with chat tokens; characters may span several tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=specials, initial_alphabet=alphabet)
    )
    hf = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", clean_up_tokenization_spaces=False)
    hf.chat_template = TEMPLATE
    return TextTokenizer(hf)


def byte_fallback_tokenizer() -> TextTokenizer:
    """SentencePiece kind: words begin with a visible space mark, unknown characters are byte tokens."""
    words = ["▁", "▁the", "▁cat", "s", "▁sat", "!", "a", "b", "c", "▁hello", "▁world", "▁x", "y"]
    vocab = {"<s>": 0, "</s>": 1, "<unk>": 2, **{f"<0x{b:02X}>": 3 + b for b in range(256)}}
    for word in words:
        vocab[word] = len(vocab)
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>"))


def info(vocab_size: int, **changes: Any) -> EngineInfo:
    facts = {
        "model_path": "/models/fake", "architecture": "FakeForCausalLM", "model_type": "fake", "dtype": "float32",
        "device": "cpu", "vocab_size": vocab_size, "context_length": 512, "max_total_tokens": 4096,
        "max_request_tokens": 512, "recording": True, "num_layers": LAYERS, "layer_ids": MOE_LAYERS,
        "num_experts": EXPERTS, "top_k": TOP_K, "eos_token_ids": (),
    }  # fmt: skip
    return EngineInfo(**{**facts, **changes})


def route_rows(tokens: list[int], start: int = 0) -> np.ndarray:
    """uint8 [len(tokens), L, K]: what FakeEngine routes the token at position start + i to."""
    t = np.asarray(tokens, np.int64)[:, None, None]
    p = np.arange(start, start + len(tokens))[:, None, None]
    layer, k = np.arange(len(MOE_LAYERS))[None, :, None], np.arange(TOP_K)[None, None, :]
    return ((7 * t + 3 * p + 5 * layer + k) % EXPERTS).astype(np.uint8)


def logprob(token: int, position: int) -> float:
    return -((token * 31 + position * 17) % 97) / 10 - 0.125


def arithmetic_script(request: EngineRequest) -> Callable[[int], int]:
    base = sum(request.input_ids) + (0 if request.sampling.greedy else request.seed)
    return lambda i: 40 + (base + 13 * i) % 200


def fixed_script(tokens: list[int]) -> Callable[[EngineRequest], Callable[[int], int]]:
    return lambda request: lambda i: tokens[i % len(tokens)]


@dataclass
class _Live:
    request: EngineRequest
    token: Callable[[int], int]
    output: list[int] = field(default_factory=list)
    reported: int = 0
    cached: int = 0
    told: tuple[int, FinishReason] | None = None


class FakeEngine:
    """EngineClient with a thread. `surplus`: steps between finish() being called and it taking effect (overlap)."""

    def __init__(
        self,
        facts: EngineInfo,
        script: Callable[[EngineRequest], Callable[[int], int]] = arithmetic_script,
        *,
        step_s: float = 0.0,
        tokens_per_step: int = 1,
        surplus: int = 0,
        weight_version: str = "default",
    ) -> None:
        self.info = facts
        self.script, self.step_s, self.tokens_per_step, self.surplus = script, step_s, tokens_per_step, surplus
        self.weight_version = weight_version
        self.live: dict[str, _Live] = {}
        self.aborted: list[str] = []
        self.finished: list[tuple[str, int]] = []
        self.seen: list[EngineRequest] = []
        self.paused = False
        self.released: list[str] | None = None
        self.profiles: list[dict[str, Any]] = []
        self.frozen = 0
        self.refuse: dict[str, FinishReason] = {}  # rid prefix -> how admission refuses it
        self.steps = self.generated = 0
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._consumer: Callable[[list[RequestOutput]], None] = lambda outputs: None
        self._stopping = False
        self._dead = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # EngineClient

    def listen(self, consumer: Callable[[list[RequestOutput]], None]) -> None:
        self._consumer = consumer

    def submit(self, requests: list[EngineRequest]) -> None:
        self._inbox.put(lambda: self._admit(requests))

    def abort(self, rid: str) -> None:
        self._inbox.put(lambda: self._abort(rid))

    def finish(self, rid: str, keep: int, reason: FinishReason) -> None:
        self._inbox.put(lambda: self._finish(rid, keep, reason))

    def control(self, name: str, /, **arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._inbox.put(lambda: self._control(future, name, arguments))
        return future

    def alive(self) -> bool:
        return not self._dead and self._thread.is_alive()

    def shutdown(self) -> None:
        self._stopping = True
        self._inbox.put(lambda: None)
        self._thread.join(5)

    def die(self) -> None:
        self._dead = True

    # the loop

    def _run(self) -> None:
        while not self._stopping:
            idle = self.paused or not self.live or self._dead
            try:
                while True:
                    self._inbox.get(block=idle, timeout=0.5)() if idle else self._inbox.get_nowait()()
                    idle = False
            except queue.Empty:
                pass
            if not self.paused and not self._dead:
                self._step()

    def _step(self) -> None:
        self.steps += 1
        if self.step_s:
            time.sleep(self.step_s)
        outputs = []
        for live in list(self.live.values()):
            params, finish = live.request.sampling, None
            for _ in range(self.tokens_per_step):
                if len(live.output) >= params.max_new_tokens:
                    finish = FinishReason("length", length=params.max_new_tokens)
                    break
                live.output.append(live.token(len(live.output)))
                stops = live.output[-1] in live.request.stop_token_ids
                if stops and len(live.output) >= params.min_new_tokens:
                    finish = FinishReason("stop", matched=live.output[-1])
                    break
            if finish is None and len(live.output) >= params.max_new_tokens:
                finish = FinishReason("length", length=params.max_new_tokens)
            if finish is None and live.told is not None:
                keep, finish = live.told
                del live.output[keep:]
                self.finished.append((live.request.rid, keep))
            outputs.append(self._output(live, finish))
        if outputs:
            self._consumer(outputs)

    def _output(self, live: _Live, finish: FinishReason | None) -> RequestOutput:
        request, prompt = live.request, len(live.request.input_ids)
        first = min(live.reported, len(live.output))
        new = live.output[first:]
        self.generated += len(new)
        output = RequestOutput(request.rid, new, prompt, live.cached, finish)
        if request.return_logprob:
            output.output_logprobs = self._logprobs(request, new, prompt + first)
            if live.reported == 0 and request.logprob_start_len >= 0 and (new or finish):
                start = request.logprob_start_len
                if start + 1 < prompt:
                    output.input_logprobs = self._logprobs(request, request.input_ids[start + 1 :], start + 1)
        live.reported = len(live.output)
        if finish is not None:
            del self.live[request.rid]
            output.weight_spans = [(self.weight_version, 0, len(live.output))]
            if request.return_routed_experts:
                output.routes_start = request.routed_experts_start_len
                fed = request.input_ids + live.output[:-1]
                if not live.output and not request.routed_experts_include_last:
                    fed = fed[:-1]
                output.routes = route_rows(fed)[output.routes_start :]
        return output

    def _logprobs(self, request: EngineRequest, tokens: list[int], position: int) -> TokenLogprobs:
        values = [logprob(t, position + i) for i, t in enumerate(tokens)]
        k, n = request.top_logprobs_num, len(tokens)
        records = TokenLogprobs(np.array(tokens, np.int32), np.array(values, np.float32))
        if k:
            records.top_ids = np.tile(np.arange(k, dtype=np.int32), (n, 1))
            records.top_logprobs = np.tile(-np.arange(1, k + 1, dtype=np.float32), (n, 1))
        if request.token_ids_logprob:
            records.given = np.tile(-np.asarray(request.token_ids_logprob, np.float32), (n, 1))
        return records

    def _admit(self, requests: list[EngineRequest]) -> None:
        for request in requests:
            self.seen.append(request)
            reason = next((r for prefix, r in self.refuse.items() if request.rid.startswith(prefix)), None)
            if reason is not None:
                self._consumer([RequestOutput(request.rid, [], len(request.input_ids), 0, reason)])
                continue
            assert request.rid not in self.live, f"{request.rid} submitted twice"
            self.live[request.rid] = _Live(request, self.script(request))

    def _abort(self, rid: str) -> None:
        self.aborted.append(rid)
        live = self.live.get(rid)
        if live is not None:
            message = "Aborted" if live.output else "Abort in waiting queue"
            self._consumer([self._output(live, FinishReason("abort", message=message))])

    def _finish(self, rid: str, keep: int, reason: FinishReason) -> None:
        live = self.live.get(rid)
        if live is None:
            return
        if self.surplus:
            live.told = (keep, reason)
            return
        del live.output[keep:]
        self.finished.append((rid, keep))
        self._consumer([self._output(live, reason)])

    def _control(self, future: Future[Any], name: str, arguments: dict[str, Any]) -> None:
        operation = getattr(self, f"_do_{name}", None)
        if operation is None:
            future.set_exception(UserError(f"there is no control operation {name!r}"))
            return
        try:
            future.set_result(operation(**arguments))
        except UserError as error:
            future.set_exception(error)

    def _do_flush_cache(self) -> bool:
        return not self.live

    def _do_pause(self, mode: str = "abort") -> None:
        if mode == "abort":
            for rid in list(self.live):
                self._abort(rid)
        self.paused = True

    def _do_resume(self) -> None:
        self.paused = False

    def _do_release_memory(self, tags: list[str] | None) -> None:
        if self.live:
            raise UserError(f"{len(self.live)} requests are running")
        self.released = tags

    def _do_resume_memory(self, tags: list[str] | None) -> None:
        if tags and "soul" in tags:
            raise UserError("unknown tag 'soul'")
        self.released = None

    def _do_check_weights(self, action: str, skip: list[str] | None) -> dict[str, Any]:
        if action not in ("checksum", "snapshot", "compare"):
            raise UserError(f"action {action!r}")
        return {
            "checksum": {"checksums": {"w": "00"}, "per_gpu_checksum": "11"},
            "compare": {"different": ["w", "v"]},
        }.get(action, {})

    def _do_start_profile(self, **order: Any) -> None:
        self.profiles.append(order)

    def _do_stop_profile(self) -> str:
        return "a.trace.json.gz"

    def _do_freeze_gc(self) -> None:
        self.frozen += 1

    def _do_loads(self) -> dict[str, Any]:
        return {
            "num_running_reqs": len(self.live), "num_waiting_reqs": 0, "num_used_tokens": 0,
            "max_total_num_tokens": self.info.max_total_tokens, "token_usage": 0.0,
            "weight_version": self.weight_version,
            "generated_tokens": self.generated, "paused": self.paused,
            "released_memory": self.released or [],
        }  # fmt: skip

    def _do_update_weight_version(self, new_version: str, abort_all_requests: bool = True) -> str:
        if abort_all_requests:
            for rid in list(self.live):
                self._abort(rid)
        self.weight_version = new_version
        return new_version

    def _do_update_weights_from_disk(
        self, model_path: str, weight_version: str | None, flush_cache: bool, abort_all_requests: bool
    ) -> str:
        if abort_all_requests:
            for rid in list(self.live):
                self._abort(rid)
        if "missing" in model_path:
            raise UserError(f"{model_path!r} is not a checkpoint directory")
        message = "Succeeded to update model weights."
        if weight_version:
            self.weight_version = weight_version
            message += f" Weight version updated to {weight_version}."
        return message

    def _do_get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[float]:
        if name != "model.norm.weight":
            raise UserError(f"no weight is named {name!r}")
        return [1.0] * min(truncate_size, 4)
