"""How a request advances: one token a step, or in passes over blocks. The engine is built with one form and asks it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tracklayer.engine.block_passes import BlockPasses
from tracklayer.engine.counters import Counters
from tracklayer.engine.delivery import Deliveries
from tracklayer.engine.grammar import GrammarState
from tracklayer.engine.record import Record
from tracklayer.routes.ids import Array
from tracklayer.scheduler.scheduler import Scheduler
from tracklayer.scheduler.sequence import Committed
from tracklayer.types import EngineRequest, FinishReason, StepResult, TokenLogprobs

if TYPE_CHECKING:
    from tracklayer.models.spec import BlocksSpec


class Advance(Protocol):
    """What the engine does at each point of a request's life.

    A Committed without `finish` says that the request goes on, one with it that it has ended.
    """

    def check(self, request: EngineRequest) -> None:
        """Raises UserError for what the model can not do for the request."""

    def begin(self, request: EngineRequest) -> Record:
        """Queue it. Raises UserError when it can never run, CapacityError when too many wait."""

    def note(self, record: Record, found: TokenLogprobs | None) -> None:
        """A share of it was computed, with what the step found at positions of its input, if anything."""

    def take(self, record: Record, news: Committed, result: StepResult, at: int | None, version: str) -> Committed:
        """The scheduler's news of it; its token, if any, is number `at` of those that the step sampled."""

    def offer(self, record: Record) -> None:
        """It goes on and wants routes: let those that are final be fetched."""

    def settle(self) -> None:
        """All news of a step were taken."""

    def preempted(self, kept: list[tuple[Record, Array]]) -> None:
        """They want routes, and their slots (int32, positions from 0 on) are about to be given away."""

    def finish(self, record: Record, keep: int, reason: FinishReason) -> Committed:
        """End it after its first `keep` output tokens, now or with a last pass."""

    def aborted(self, record: Record, ended: Committed) -> Committed:
        """What is left of it when the scheduler has ended it at once."""

    def num_kept(self, record: Record, ended: Committed) -> int:
        """Output tokens that it ends with."""


class ByTokens:
    """The scheduler's sequence is the request. `states`: by request id, where in its grammar it is."""

    def __init__(
        self, scheduler: Scheduler, deliveries: Deliveries, counters: Counters, states: dict[str, GrammarState]
    ) -> None:
        self.scheduler, self.deliveries, self.counters, self.states = scheduler, deliveries, counters, states

    def check(self, request: EngineRequest) -> None:
        return

    def begin(self, request: EngineRequest) -> Record:
        sequence = self.scheduler.add(request)
        return Record(request, sequence, limit=len(request.input_ids) + sequence.max_new)

    def note(self, record: Record, found: TokenLogprobs | None) -> None:
        if found is not None:
            record.input_logprobs.append(found)

    def take(self, record: Record, news: Committed, result: StepResult, at: int | None, version: str) -> Committed:
        if news.token is None:
            return news
        assert at is not None, f"{record.request.rid}: a token that no step sampled"
        record.take(news.token, at, result, version)
        self.counters.generated_tokens += 1
        return news if news.finish is not None else self._accept(news, news.token)

    def _accept(self, news: Committed, token: int) -> Committed:
        """Tell the request's grammar, if it has one, of its token; the end of the grammar is the request's."""
        rid = news.seq.rid
        state = self.states.get(rid)
        if state is None:
            return news
        reason = None
        if not state.accept(token):
            message = f"token {token} does not fit the grammar: the model's logits were not numbers"
            reason = FinishReason("abort", message=message, status=500)
        elif state.finished:
            reason = FinishReason("stop", matched=token)
        ended = self.scheduler.finish(rid, len(news.seq.output_ids), reason) if reason else None
        return ended or news

    def offer(self, record: Record) -> None:
        self.deliveries.offer(record)

    def settle(self) -> None:
        return

    def preempted(self, kept: list[tuple[Record, Array]]) -> None:
        """Rows of tokens that were already given out win over those that recomputing them will write."""
        self.deliveries.save(kept)

    def finish(self, record: Record, keep: int, reason: FinishReason) -> Committed:
        ended = self.scheduler.finish(record.request.rid, keep, reason)
        assert ended is not None, f"{record.request.rid} has a record and no sequence"
        return ended

    def aborted(self, record: Record, ended: Committed) -> Committed:
        return ended

    def num_kept(self, record: Record, ended: Committed) -> int:
        return len(ended.seq.output_ids)


def form_of(
    blocks: BlocksSpec | None,
    confidence: float,
    scheduler: Scheduler,
    deliveries: Deliveries,
    counters: Counters,
    states: dict[str, GrammarState],
) -> Advance:
    """The form for a model that fills such blocks, or for one that predicts the next token (None)."""
    if blocks is None:
        return ByTokens(scheduler, deliveries, counters, states)
    return BlockPasses(
        scheduler, deliveries, counters, length=blocks.length, mask_id=blocks.mask_id, confidence=confidence
    )
