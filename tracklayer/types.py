"""The plain records that travel between stages. Standard library and numpy only.

    SamplingParams, EngineRequest      front end -> engine
    StepPlan, Share                    scheduler -> runner
    StepResult                         runner -> scheduler
    RequestOutput                      engine -> front end

Words: a *row* is a request's line in the runner's device tables, fixed while it runs; a *slot* is the place of
one token in the KV cache and in the route pool; a *share* is one request's part of a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np

from tracklayer.errors import UserError

TOP_K_ALL = 1 << 30
GREEDY_BELOW = 1e-6
INT64_MAX = (1 << 63) - 1
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")  # at most one of a request's is set
LARGEST_BIAS = 1e30  # a float32 with room for a sum


def _number(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> None:
    """Refuse what is not a finite number in [low, high] (or (low, high] with `low_open`)."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or value > high or value < low or (low_open and value == low):
        raise UserError(f"{name} must be a number in {'(' if low_open else '['}{low}, {high}], got {value!r}")


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        bound = f">= {low}" if high is None else f"in {low}..{high}"
        raise UserError(f"{name} must be an integer {bound}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled; names and defaults are SGLang's.

    temperature below 1e-6 means greedy. top_k -1 means all. `max_new_tokens=None` runs to the end of the context.
    `n`, `stop`, `stop_regex` and the detokenising switches are the front end's; the engine reads the rest.
    """

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    n: int = 1
    sampling_seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    custom_params: dict[str, Any] | None = None
    stream_interval: int | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "stop_regex", "stop_token_ids"):  # one value or several
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, (str, int)) else tuple(value or ()))
        bias = self.logit_bias.items() if isinstance(self.logit_bias, dict) else self.logit_bias or ()
        for token, value in bias:
            _number(f"logit_bias of token {token}", value, -LARGEST_BIAS, LARGEST_BIAS)
        object.__setattr__(self, "logit_bias", tuple((int(token), float(value)) for token, value in bias))
        if self.max_new_tokens is not None:
            _integer("max_new_tokens", self.max_new_tokens, 0)
        _integer("min_new_tokens", self.min_new_tokens, 0, self.max_new_tokens)
        _number("temperature", self.temperature, 0.0, 1e6)
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.top_k != -1:
            _integer("top_k", self.top_k, 1, INT64_MAX)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 2.0, low_open=True)
        _integer("n", self.n, 1)
        if self.sampling_seed is not None:
            _integer("sampling_seed", self.sampling_seed, -INT64_MAX - 1, INT64_MAX)
        if self.stream_interval is not None:
            _integer("stream_interval", self.stream_interval, 1, INT64_MAX)
        for name in ("stop", "stop_regex"):
            if len(getattr(self, name)) > 32:
                raise UserError(f"{name} takes at most 32 entries, got {len(getattr(self, name))}")
            for entry in getattr(self, name):
                if not isinstance(entry, str):
                    raise UserError(f"{name} must hold strings, got {entry!r}")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0)
        grammars = [g for g in GRAMMARS if getattr(self, g)]
        if len(grammars) > 1:
            raise UserError(f"give one of {grammars}, not several")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def constrained(self) -> bool:
        """Whether a grammar says which tokens may come."""
        return any(getattr(self, name) for name in GRAMMARS)

    @property
    def penalised(self) -> bool:
        return self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1

    @classmethod
    def from_dict(cls, raw: dict[str, Any] | None) -> SamplingParams:
        """Build from a JSON object: null means default, `stop`-like keys take one value or a list.

        Raises UserError for an unknown key, naming it and the known ones.
        """
        raw = {k: v for k, v in (raw or {}).items() if v is not None}
        known = {f.name for f in fields(cls)}
        for key in raw:
            if key not in known:
                raise UserError(f"unknown field `{key}`, expected one of {', '.join(sorted(known))}")
        return cls(**raw)


@dataclass(slots=True, kw_only=True)
class EngineRequest:
    """One sequence to generate (n > 1 is n of these). Token ids only: text lives in the front end.

    `stop_token_ids` is resolved by the front end: EOS ids and the request's own, empty with ignore_eos.
    `seed` is resolved too: equal (seed, position) sample equally whatever the batch.
    news_interval: output tokens between news after the first token's; 1 for who streams or looks for stop strings.
    masked_from: set by the engine in passes over a block that is being filled (block diffusion): positions from here on
    are kept out of the prefix cache, and the masked ones among them are sampled.
    """

    rid: str
    input_ids: list[int]
    sampling: SamplingParams
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: tuple[int, ...] = ()
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    routed_experts_include_last: bool = False
    priority: int = 0
    cache_key: str = ""
    news_interval: int = 1
    masked_from: int | None = None


@dataclass(slots=True)
class FinishReason:
    """Why a request ended. `matched` is the stop token id, string or regex; `message` says why it was aborted."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None
    status: int | None = None


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities of n positions; a missing value is NaN (the first prompt position has none).

    logprobs float32 [n]; token_ids int32 [n]; top_ids int32 / top_logprobs float32 [n, k]; given float32 [n, g].
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    given: np.ndarray | None = None


@dataclass(slots=True)
class RequestOutput:
    """News of one request: the tokens since the last news, and at the end everything that the end brings.

    routes is [rows, L, K] in the pool's narrow type, row 0 at position `routes_start` (set when finished and asked).
    weight_spans: (version, first output position, end) half-open, contiguous from 0. queue_s: seconds that it waited
    for its first step.
    """

    rid: str
    new_token_ids: list[int]
    prompt_tokens: int
    cached_tokens: int
    finish: FinishReason | None = None
    output_logprobs: TokenLogprobs | None = None
    input_logprobs: TokenLogprobs | None = None
    routes: np.ndarray | None = None
    routes_start: int = 0
    weight_spans: list[tuple[str, int, int]] = field(default_factory=list)
    num_retractions: int = 0
    queue_s: float = 0.0
    error: str | None = None


@dataclass(slots=True)
class Share:
    """One request's part of a step: the tokens at positions start..start+n-1 go through the model.

    slots holds the KV slots of positions table_start..start+n-1: the last n are this step's own, those before are
    a reused prefix that the runner must enter into its slot table (only in the first share after admission).
    token_ids None: feed the one token that the step before sampled for this row (it may still be on the device).
    samples: the share ends with the newest token, so the next one is sampled from it.
    logprobs_from: the logits of prompt positions p >= this, within this share, are wanted: those of p give the
    log-probability of prompt token p+1, also when that is in the next share; None: none.
    window_slots: with `slots`, where layers that see a window only keep the same positions (scheduler/windows.py);
    None: in the same slots.
    admitted: set in the first share after (re-)admission: the row is new and its device state must be laid.
    history: with admitted, all tokens known so far (prompt and earlier output), for penalties after a preemption.
    """

    rid: str
    row: int
    start: int
    num_tokens: int
    slots: np.ndarray
    table_start: int
    token_ids: list[int] | None
    samples: bool
    logprobs_from: int | None = None
    admitted: EngineRequest | None = None
    history: list[int] | None = None
    window_slots: np.ndarray | None = None

    @property
    def windowed(self) -> np.ndarray:
        """The slots of layers that see a window only."""
        return self.slots if self.window_slots is None else self.window_slots


@dataclass(slots=True)
class StepPlan:
    """One forward. Decode shares (one token, sampling) come first, then prefill shares.

    copies int32 [n, 2]: (source slot, target slot) of KV and routes to copy before the forward (partial pages);
    window_copies: the same in the caches of layers that see a window only; None: in the same slots.
    """

    step: int
    shares: list[Share]
    copies: np.ndarray
    window_copies: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.shares)

    @property
    def num_decodes(self) -> int:
        """Shares that feed the token sampled before."""
        return sum(s.token_ids is None for s in self.shares)

    @property
    def decode_only(self) -> bool:
        return all(s.num_tokens == 1 and s.samples for s in self.shares)


@dataclass(slots=True)
class StepResult:
    """What a forward gave, for the shares with `samples`, in plan order.

    token_ids int32 [n]. logprobs is set when any of these rows asked: float32 [n]; top_* [n, k] for the largest k
    asked. prompt_logprobs: by share index, for the positions that the share asked for; of a pass over a block
    (EngineRequest.masked_from) the tokens sampled at its masked positions, in order.
    given: by sampled index, float32 [g] for rows with token_ids_logprob.
    """

    step: int
    token_ids: np.ndarray
    logprobs: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    given: dict[int, np.ndarray] = field(default_factory=dict)
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
