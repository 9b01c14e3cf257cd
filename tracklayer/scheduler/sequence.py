"""The scheduler's records: its sizes, one request while it lives, and the news of a step."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from tracklayer.errors import UserError
from tracklayer.scheduler.prefix import EMPTY, Ints, Node
from tracklayer.scheduler.sight import Sight
from tracklayer.types import EngineRequest, FinishReason, Share


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Sizes. num_slots counts page 0, which is never given out. max_step_tokens: decode tokens count in it first.

    block_length: prefixes are cut, and chunks end, at multiples of it only (block diffusion).
    num_window_slots: of the caches of layers that see `sight` only, see windows.py; 0: they use the others' slots.
    """

    num_slots: int
    page_size: int
    max_running_requests: int
    max_step_tokens: int
    context_length: int
    max_queued_requests: int | None = None
    prefix_cache: bool = True
    block_length: int = 1
    num_window_slots: int = 0
    sight: Sight | None = None

    def __post_init__(self) -> None:
        sizes = ("num_slots", "page_size", "max_running_requests", "max_step_tokens", "context_length", "block_length")
        for name in sizes:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"{name} must be a positive integer, got {value!r}")
        if self.num_slots < 2 * self.page_size:
            raise UserError(
                f"{self.num_slots} slots are less than two pages of {self.page_size}; raise max_total_tokens"
            )
        if self.max_step_tokens < self.block_length:
            raise UserError(
                f"a step of {self.max_step_tokens} tokens can not hold a block of {self.block_length}; raise "
                "chunked_prefill_size"
            )

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output together that one request can ever have."""
        return min(self.context_length, (self.num_slots // self.page_size - 1) * self.page_size)

    def output_limit(self, request: EngineRequest) -> int:
        """Output tokens that the request may have. Raises UserError for a request that can never be served."""
        prompt_len, wanted = len(request.input_ids), request.sampling.max_new_tokens
        if prompt_len == 0:
            raise UserError("the prompt is empty: give at least one token")
        if prompt_len >= self.context_length:
            raise UserError(
                f"the prompt has {prompt_len} tokens, but context_length is {self.context_length}; shorten the prompt"
            )
        total = prompt_len + (1 if wanted is None else wanted)
        if total > self.context_length:
            raise UserError(
                f"the prompt's {prompt_len} tokens and max_new_tokens {wanted} are {total} together, more than "
                f"context_length {self.context_length}; lower one of them"
            )
        if total > self.max_request_tokens:
            raise UserError(
                f"the prompt's {prompt_len} tokens and {total - prompt_len} new ones need {total} cache slots, but the "
                f"cache can hold {self.max_request_tokens}; shorten the request or raise max_total_tokens"
            )
        return self.max_request_tokens - prompt_len if wanted is None else wanted


class SequenceState(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One request while it lives.

    rank: (-priority, order of arrival); the smaller is served first and preempted last.
    max_new: output tokens at most. num_computed: tokens whose KV is planned. in_flight: sampled tokens that are planned
    and not yet committed; to_sample: samples that may still be planned.
    logprobs_next: first prompt position that no plan has computed for its log-probabilities yet; None: none are wanted.
    fill: tokens (int32) known at the last admission, that is what must be prefilled before decoding goes on.
    slots: int32, position -> slot, valid below num_allocated. cached_tokens: prefix hit of the first admission.
    node, num_inserted: the locked place in the prefix tree, and the tokens on the path to it; positions in
    `duplicates` (half-open) are in the tree too, with other slots: those pages, and all past num_inserted, are its own.
    private: nothing is entered in the tree before the end, so that no page is held twice.
    renewed: its request was replaced, and no plan has said so yet.
    window_from: the first of its pages whose window page it holds; window_due: from which position on to look again.
    """

    request: EngineRequest
    rank: tuple[int, int]
    prompt_len: int
    max_new: int
    prompt: Ints
    to_sample: int
    logprobs_next: int | None
    output_ids: list[int] = field(default_factory=list)
    state: SequenceState = SequenceState.WAITING
    row: int | None = None
    num_computed: int = 0
    in_flight: int = 0
    last_step: int = -1
    fill: Ints = field(default_factory=lambda: EMPTY)
    slots: Ints = field(default_factory=lambda: EMPTY)
    num_allocated: int = 0
    node: Node | None = None
    num_inserted: int = 0
    duplicates: list[tuple[int, int]] = field(default_factory=list)
    waits_for: Sequence | None = None
    private: bool = False
    renewed: bool = False
    admitted_once: bool = False
    cached_tokens: int = 0
    num_retractions: int = 0
    window_from: int = 0
    window_due: int = 0

    @property
    def rid(self) -> str:
        return self.request.rid

    @property
    def prefilling(self) -> bool:
        return self.num_computed < len(self.fill)

    @property
    def cacheable(self) -> int:
        """Tokens, from the first on, that the prefix tree may keep: masks and what is computed beside them are not."""
        masked = self.request.masked_from
        return self.prompt_len + self.max_new if masked is None else masked

    def whole_blocks(self, start: int, most: int, block_length: int) -> int:
        """How many tokens of the prefill come next from `start` on, at most `most`: blocks are never cut."""
        end = min(start + most, len(self.fill))
        return end - start if end == len(self.fill) else end - end % block_length - start

    def known(self) -> Ints:
        """Prompt and committed output, int32."""
        if not self.output_ids:
            return self.prompt
        return np.concatenate((self.prompt, np.array(self.output_ids, np.int32)))

    def renew(self, request: EngineRequest) -> None:
        """Go on with another request of the same id, that has all tokens of this one's before its masks."""
        begin = self.request.masked_from
        assert begin is not None and begin < len(request.input_ids) and not self.output_ids and not self.in_flight
        if self.state is SequenceState.RUNNING:
            self.num_computed = begin
        self.request, self.renewed = request, True
        self.prompt = self.fill = np.concatenate((self.prompt[:begin], np.array(request.input_ids[begin:], np.int32)))
        self.prompt_len = len(self.prompt)

    def follow(self, before: Sequence) -> None:
        """Take over the place in the order, and what is told of the first admission, from the sequence before."""
        self.rank, self.admitted_once = before.rank, before.admitted_once
        self.cached_tokens, self.num_retractions = before.cached_tokens, before.num_retractions

    def hit_limit(self) -> int:
        """Longest prefix hit allowed: one token at least is computed, and all whose log-probability is wanted."""
        limit = self.prompt_len + len(self.output_ids) - 1
        if self.logprobs_next is not None and self.logprobs_next < self.prompt_len:
            limit = min(limit, self.logprobs_next)
        return limit


def by_rank(seq: Sequence) -> tuple[int, int]:
    return seq.rank


@dataclass(slots=True)
class Committed:
    """One sequence's news: the token that it gained, or None, and why it ended, or None.

    slots (with `finish`, or after a pass over masks): int32, the slots of positions 0..P+C-2 (all P without output) as
    far as they are in the cache now. They hold their KV and routes until the next `plan`. A sequence that ended while
    it waited after a preemption has none: what it had was handed out by `take_preempted`.
    """

    seq: Sequence
    token: int | None
    finish: FinishReason | None = None
    slots: Ints = field(default_factory=lambda: EMPTY)


@dataclass(slots=True)
class Draft:
    """A plan that is being made. sampled, ended: sequences that get a token, or end without one, at its commit."""

    step: int
    budget: int
    shares: list[Share] = field(default_factory=list)
    copies: list[Ints] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)
    prefilling: list[Sequence] = field(default_factory=list)
    wanted_pages: int = 0
