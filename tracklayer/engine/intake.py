"""A call as users make it (text, ids, lists, n > 1) becomes checked prompts, and these become EngineRequests.

Field names and rules are those of SGLang's /generate. Everything that can never succeed is refused here with a
UserError, before the engine hears of it.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tracklayer.engine.call_check import check_fields, plain_ids
from tracklayer.engine.client import EngineInfo
from tracklayer.engine.detokenizer import compile_pattern
from tracklayer.engine.grammar import check_grammar
from tracklayer.engine.limits import NO_LIMITS, Limits
from tracklayer.engine.sampling import is_int, parse_sampling, short
from tracklayer.engine.tokenizer import TextTokenizer
from tracklayer.errors import UserError
from tracklayer.types import EngineRequest, SamplingParams

Many = list[Any]
QUIET_TOKENS = 64  # news of a request whose caller waits for the whole answer come this many tokens apart


@dataclass(slots=True, kw_only=True)
class GenerateCall:
    """One call: one prompt, or a batch when `text` / `input_ids` is a list of prompts.

    List-valued fields hold one value per prompt. `include_last`: also the last row of a prefill-only call's routes.
    `text_special_tokens` False: the text already holds its special tokens (it came from a chat template).
    """

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: SamplingParams | dict[str, Any] | list[Any] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | Many = False
    logprob_start_len: int | Many = -1
    top_logprobs_num: int | Many = 0
    token_ids_logprob: Many | None = None
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    include_last: bool = False
    stream: bool = False
    priority: int | None = None
    extra_key: str | list[str] | None = None
    cache_salt: str | list[str] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        self.input_ids = plain_ids(self.input_ids)

    @property
    def batched(self) -> bool:
        """Whether the reply is a list even for one prompt with n = 1."""
        ids = self.input_ids
        return isinstance(self.text, list) or (isinstance(ids, list) and bool(ids) and isinstance(ids[0], list))


@dataclass(slots=True, kw_only=True)
class Prompt:
    """One checked prompt of a call with everything that its n requests share."""

    index: int
    rid: str
    text: str | None
    input_ids: list[int]
    sampling: SamplingParams
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: tuple[int, ...]
    cache_key: str


class Intake:
    """Turns calls into prompts and prompts into EngineRequests; knows the engine's facts and the tokenizer."""

    def __init__(
        self,
        info: EngineInfo,
        tokenizer: TextTokenizer | None,
        *,
        random_seed: int | None = None,
        limits: Limits = NO_LIMITS,
        default_sampling: dict[str, Any] | None = None,
        auto_truncate: bool = False,
        stream_interval: int = 1,
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self.limits = limits
        self.default_sampling = default_sampling or {}
        self.auto_truncate = auto_truncate
        self.stream_interval = stream_interval
        self.eos = frozenset(info.eos_token_ids) | (tokenizer.eos_token_ids if tokenizer else frozenset())
        self._seeds = random.Random(random_seed)

    def split(self, call: GenerateCall) -> list[Prompt]:
        """The prompts of a call, checked but for what needs their tokens (`encode`, then `check_length`)."""
        texts, ids = call.text, call.input_ids
        if (texts is None) == (ids is None):
            raise UserError("Either text, input_ids or input_embeds should be provided.")
        if texts is not None and self.tokenizer is None:
            raise UserError("text needs a tokenizer, which --skip-tokenizer-init left out: send input_ids")
        given_prompts: Any = texts if texts is not None else ids
        prompts: Many = given_prompts if call.batched else [given_prompts]
        count = len(prompts)
        if count == 0:
            raise UserError("the batch is empty: give at least one prompt")
        self.limits.check("max_batch_prompts", count)
        sampling = self._sampling(call, count)
        n = sampling[0].n
        self.limits.check("max_batch_sequences", count * n)
        for name in ("return_logprob", "logprob_start_len", "top_logprobs_num"):
            if n > 1 and isinstance(getattr(call, name), list):
                raise UserError(f"{name} must be one value, not a list, when n > 1")
        rids = self._rids(call, count)
        if call.return_routed_experts and not self.info.recording:
            raise UserError(
                "return_routed_experts needs a server that records routes: start it with --enable-return-routed-experts"
            )
        if call.routed_experts_start_len < 0:
            raise UserError(f"routed_experts_start_len must be >= 0, got {call.routed_experts_start_len}")
        given = _given_lists(call.token_ids_logprob, count)
        top = [_pick(call.top_logprobs_num, i, count, "top_logprobs_num", 0) for i in range(count)]
        self.limits.check("max_top_logprobs", max(*top, *map(len, given)))
        if max(top) > self.info.vocab_size:
            raise UserError(f"top_logprobs_num must be at most {self.info.vocab_size} (the vocabulary), got {max(top)}")
        return [
            Prompt(
                index=i,
                rid=rids[i],
                text=prompts[i] if texts is not None else None,
                input_ids=[] if texts is not None else prompts[i],
                sampling=sampling[i],
                return_logprob=bool(_pick(call.return_logprob, i, count, "return_logprob", False)),
                logprob_start_len=_pick(call.logprob_start_len, i, count, "logprob_start_len", -1),
                top_logprobs_num=top[i],
                token_ids_logprob=self._vocabulary(given[i], "token_ids_logprob"),
                cache_key=_cache_key(call, i, count),
            )
            for i in range(count)
        ]

    def _news_interval(self, call: GenerateCall, params: SamplingParams) -> int:
        """Tokens between two pieces of news: each one is needed to cut at a stop exactly and at once."""
        if params.stop or params.stop_regex:
            return 1
        return params.stream_interval or self.stream_interval if call.stream else QUIET_TOKENS

    def _sampling(self, call: GenerateCall, count: int) -> list[SamplingParams]:
        raw = call.sampling_params
        each = raw if isinstance(raw, list) else [raw] * count
        if len(each) != count:
            raise UserError(f"sampling_params has {len(each)} entries for {count} prompts")
        parsed = [parse_sampling(each[0], self.default_sampling)] * count
        if isinstance(raw, list):
            parsed = [parse_sampling(r, self.default_sampling) for r in each]
        for params in parsed if isinstance(raw, list) else parsed[:1]:
            self._check_sampling(params)
        if len({p.n for p in parsed}) > 1:
            raise UserError(f"all prompts of a batch share n, got {sorted({p.n for p in parsed})}")
        return parsed

    def _check_sampling(self, params: SamplingParams) -> None:
        self.limits.check("max_samples", params.n)
        check_grammar(params)
        if self.tokenizer is None and params.constrained:
            raise UserError("structured output needs a tokenizer: start without --skip-tokenizer-init")
        if self.tokenizer is None and (params.stop or params.stop_regex or params.min_new_tokens):
            raise UserError("stop, stop_regex and min_new_tokens need a tokenizer: start without --skip-tokenizer-init")
        if "" in params.stop:
            raise UserError("stop holds an empty string; leave it out")
        self.limits.check("max_stop_characters", sum(map(len, params.stop)))
        for source in params.stop_regex:
            compile_pattern(source)
        self._vocabulary(params.stop_token_ids, "stop_token_ids")
        self._vocabulary([token for token, _ in params.logit_bias], "logit_bias")

    def _vocabulary(self, ids: Sequence[int], name: str) -> tuple[int, ...]:
        for token in ids:
            if not 0 <= token < self.info.vocab_size:
                raise UserError(f"{name}: token id {token} is outside the vocabulary (0..{self.info.vocab_size - 1})")
        return tuple(ids)

    def _rids(self, call: GenerateCall, count: int) -> list[str]:
        rid = call.rid
        if rid is None:
            return [uuid.uuid4().hex for _ in range(count)]
        if isinstance(rid, str):
            return [f"{rid}_{i}" for i in range(count)] if call.batched else [rid]
        if len(rid) != count:
            raise UserError(f"rid has {len(rid)} entries for {count} prompts")
        if len(set(rid)) != count:
            raise UserError(f"Duplicate request ID in the batch: {short(rid)}")
        return list(rid)

    def encode(self, prompt: Prompt) -> None:
        """Fill in the token ids of a prompt given as text. Slow for long text: keep it off the event loop."""
        if prompt.text is not None:
            assert self.tokenizer is not None
            prompt.input_ids = self.tokenizer.encode(prompt.text)

    def check_length(self, prompt: Prompt, call: GenerateCall) -> None:
        """Checks that need the prompt's tokens; also resolves max_new_tokens None to the room that is left."""
        ids, room = prompt.input_ids, min(self.info.context_length, self.info.max_request_tokens)
        if not ids:
            raise UserError("the prompt is empty: it must hold at least one token")
        if min(ids) < 0 or max(ids) >= self.info.vocab_size:
            self._vocabulary(ids, "input_ids")
        wanted = prompt.sampling.max_new_tokens
        if self.auto_truncate and len(ids) + (wanted or 0) > room:
            prompt.input_ids = ids = ids[: room - 1]
            wanted = min(room - len(ids), room if wanted is None else wanted)
            low = min(prompt.sampling.min_new_tokens, wanted)
            prompt.sampling = replace(prompt.sampling, max_new_tokens=wanted, min_new_tokens=low)
        self._check_room(len(ids), wanted)
        if wanted is None:
            prompt.sampling = replace(prompt.sampling, max_new_tokens=room - len(ids))
        if not -1 <= prompt.logprob_start_len <= len(ids):
            raise UserError(
                f"logprob_start_len must be -1 or in 0..{len(ids)} (the prompt's length), "
                f"got {prompt.logprob_start_len}"
            )
        if call.routed_experts_start_len > len(ids):
            raise UserError(
                f"routed_experts_start_len ({call.routed_experts_start_len}) is higher than the number of input "
                f"tokens ({len(ids)})"
            )

    def _check_room(self, length: int, wanted: int | None) -> None:
        context, cache = self.info.context_length, self.info.max_request_tokens
        if length >= context:
            raise UserError(
                f"The input ({length} tokens) is longer than the model's context length ({context} tokens) allows"
            )
        total = length + (wanted or 0)
        if total > context:
            raise UserError(
                f"Requested token count exceeds the model's maximum context length of {context} tokens: "
                f"{length} input + {wanted} new = {total}; lower max_new_tokens or shorten the prompt"
            )
        if total > cache or length >= cache:
            raise UserError(
                f"{length} input + {wanted or 0} new tokens can never fit the KV cache, which holds {cache} for one "
                "request; shorten the request or start the server with a larger --max-total-tokens"
            )

    def requests(self, prompt: Prompt, call: GenerateCall) -> list[EngineRequest]:
        """The n EngineRequests of a checked prompt. Sample k's seed follows from the request's seed and k."""
        params = prompt.sampling
        base = self._seeds.getrandbits(62) if params.sampling_seed is None else params.sampling_seed
        stop_ids = frozenset() if params.ignore_eos else self.eos | frozenset(params.stop_token_ids)
        # a start at the prompt's end asks for no prompt position
        start = prompt.logprob_start_len if prompt.logprob_start_len < len(prompt.input_ids) else -1
        return [
            EngineRequest(
                rid=prompt.rid if params.n == 1 else f"{prompt.rid}-{k}",
                input_ids=prompt.input_ids,
                sampling=params,
                seed=sample_seed(base, k),
                stop_token_ids=stop_ids,
                return_logprob=prompt.return_logprob,
                logprob_start_len=start if prompt.return_logprob else -1,
                top_logprobs_num=prompt.top_logprobs_num if prompt.return_logprob else 0,
                token_ids_logprob=prompt.token_ids_logprob if prompt.return_logprob else (),
                return_routed_experts=call.return_routed_experts,
                routed_experts_start_len=call.routed_experts_start_len if call.return_routed_experts else 0,
                routed_experts_include_last=call.include_last,
                priority=call.priority or 0,
                cache_key=prompt.cache_key,
                news_interval=self._news_interval(call, params),
            )
            for k in range(params.n)
        ]


def sample_seed(seed: int, k: int) -> int:
    """Seed of sample k of a request: the request's own for k = 0, well-mixed and fixed for the others (int64)."""
    if k == 0:
        return seed
    mask = (1 << 64) - 1
    z = (seed + k * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1


def _pick(value: Any, i: int, count: int, name: str, default: Any) -> Any:
    """Prompt i's value of a field that holds one value for all or a list with one per prompt; null is the default."""
    if isinstance(value, list):
        if len(value) != count:
            raise UserError(f"{name} has {len(value)} entries for {count} prompts")
        value = value[i]
    value = default if value is None else value
    if not isinstance(value, type(default)) or (isinstance(value, bool) and not isinstance(default, bool)):
        raise UserError(f"{name} must be {type(default).__name__} values, got {short(value)}")
    if name == "top_logprobs_num" and value < 0:
        raise UserError(f"top_logprobs_num must be >= 0, got {value}")
    return value


def _given_lists(value: Many | None, count: int) -> list[Sequence[int]]:
    """token_ids_logprob of each prompt: one flat list serves all, a list of lists has one per prompt."""
    if not value:
        return [()] * count
    if all(map(is_int, value)):
        return [value] * count
    if len(value) != count:
        raise UserError(f"token_ids_logprob has {len(value)} entries for {count} prompts")
    for one in value:
        if one is not None and not (isinstance(one, list) and all(map(is_int, one))):
            raise UserError(f"token_ids_logprob must hold lists of token ids, got {short(one)}")
    return [one or () for one in value]


def _cache_key(call: GenerateCall, i: int, count: int) -> str:
    """Prefix-cache namespace of prompt i: extra_key and cache_salt together, "" when neither is given."""
    parts = []
    for name in ("extra_key", "cache_salt"):
        value = getattr(call, name)
        if isinstance(value, list):
            if len(value) != count:
                raise UserError(f"{name} has {len(value)} entries for {count} prompts")
            value = value[i]
        parts.append(value or "")
    extra, salt = parts
    return f"{len(extra)}:{extra}{salt}" if extra or salt else ""  # the length keeps pairs with equal joins apart
