"""Takes requests through the passes of block diffusion; blocks.py keeps how far each is."""

from __future__ import annotations

from tracklayer.engine import blocks
from tracklayer.engine.blocks import BlockRun
from tracklayer.engine.counters import Counters
from tracklayer.engine.delivery import Deliveries
from tracklayer.engine.record import Record
from tracklayer.routes.ids import Array
from tracklayer.scheduler.scheduler import Scheduler
from tracklayer.scheduler.sequence import Committed
from tracklayer.types import EngineRequest, FinishReason, StepResult, TokenLogprobs


class BlockPasses:
    """One sequence of the scheduler takes a request through all its passes, renewed after each.

    confidence: probability from which a sampled token stays; the likeliest of a pass always does.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        deliveries: Deliveries,
        counters: Counters,
        *,
        length: int,
        mask_id: int,
        confidence: float,
    ) -> None:
        self.scheduler, self.deliveries, self.counters = scheduler, deliveries, counters
        self.length, self.mask_id, self.confidence = length, mask_id, confidence
        self._final: list[tuple[Record, Array]] = []  # slots of positions in their final form, from 0 on

    def check(self, request: EngineRequest) -> None:
        blocks.check(request, self.length, self.mask_id, self.scheduler.config.max_request_tokens)

    def begin(self, request: EngineRequest) -> Record:
        """Queue the first pass."""
        run = blocks.start(request, self.length, self.mask_id, self.scheduler.config.max_request_tokens)
        return Record(request, self.scheduler.add(run.next_pass()), limit=run.limit, blocks=run)

    def note(self, record: Record, found: TokenLogprobs | None) -> None:
        """Keep what a pass has sampled for the masked positions until the scheduler says that it has ended."""
        _run(record).found = found

    def take(self, record: Record, news: Committed, result: StepResult, at: int | None, version: str) -> Committed:
        """A pass has come back."""
        run, request = _run(record), record.request
        if run.ending is not None:
            return Committed(news.seq, None, run.ending, news.slots)
        assert run.found is not None, f"{request.rid}: a pass brought no tokens"
        if request.return_routed_experts:  # rows of finished blocks come home at once: an abort keeps them
            self._final.append((record, news.slots[: run.begin]))
        run.fill(run.found, self.confidence)
        if run.masked:
            return self._go_on(record)
        for token, logprobs in run.filled():
            record.append(token, version, logprobs if request.return_logprob else None)
            self.counters.generated_tokens += 1
            if token in request.stop_token_ids:
                return self._end(record, FinishReason("stop", matched=token))
            if len(request.input_ids) + record.num_output == run.limit:
                return self._end(record, FinishReason("length", length=record.num_output))
        run.advance()
        return self._go_on(record)

    def offer(self, record: Record) -> None:
        """Its rows were saved when their blocks were final."""

    def settle(self) -> None:
        self.deliveries.save(self._final)
        self._final = []

    def preempted(self, kept: list[tuple[Record, Array]]) -> None:
        """A pass is not told of before its end, so none of its rows was given out."""

    def finish(self, record: Record, keep: int, reason: FinishReason) -> Committed:
        """End a request after its first `keep` output tokens; the pass under way is for nothing."""
        record.cut(keep)
        run, before = _run(record), record.sequence
        ended = self._drop(record, reason)
        if record.request.return_routed_experts:
            run.end(record.num_output, reason)
            record.sequence = self.scheduler.add(run.next_pass(), after=before)
            ended = Committed(record.sequence, None)
        return ended

    def _drop(self, record: Record, reason: FinishReason) -> Committed:
        """End the sequence whatever it does."""
        ended = self.scheduler.finish(record.request.rid, 0, reason)
        assert ended is not None, f"{record.request.rid} has a record and no sequence"
        return ended

    def aborted(self, record: Record, ended: Committed) -> Committed:
        """Only positions that a pass has computed in their final form have rows."""
        ended.slots = ended.slots[: _run(record).begin]
        return ended

    def num_kept(self, record: Record, ended: Committed) -> int:
        return record.num_output

    def _end(self, record: Record, reason: FinishReason) -> Committed:
        """Routes that were asked for need one more pass, over the last block in its final form."""
        if not record.request.return_routed_experts:
            return self._drop(record, reason)
        _run(record).end(record.num_output, reason)
        return self._go_on(record)

    def _go_on(self, record: Record) -> Committed:
        """With the next pass, in the same place of the cache."""
        self.scheduler.renew(record.sequence, _run(record).next_pass())
        return Committed(record.sequence, None)


def _run(record: Record) -> BlockRun:
    assert record.blocks is not None, f"{record.request.rid} fills no blocks"
    return record.blocks
