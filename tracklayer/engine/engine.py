"""The engine's core: plan, launch, commit, deliver. One thread; everything that it owns is touched by that thread only.

With overlap the step before is committed after the next is launched; the same calls, in another order.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tracklayer.config import EngineConfig
from tracklayer.engine.block_passes import BlockPasses, final_slots
from tracklayer.engine.build import build_engine
from tracklayer.engine.client import failed
from tracklayer.engine.counters import Counters
from tracklayer.engine.delivery import Deliveries
from tracklayer.engine.grammar import Grammars, GrammarState, StepMask
from tracklayer.engine.record import Record
from tracklayer.errors import TracklayerError, UserError
from tracklayer.runner.load import LoadedModel, load_model
from tracklayer.runner.runner import PendingStep
from tracklayer.scheduler.sequence import Committed
from tracklayer.types import EngineRequest, FinishReason, RequestOutput, StepPlan

log = logging.getLogger(__name__)


class EngineCore:
    """Builds everything from a config, then runs steps. `step` returns the news of requests.

    `model` is one that is loaded already (two engines may share it).
    """

    def __init__(self, config: EngineConfig, *, model: LoadedModel | None = None) -> None:
        self.config = config
        self.seed = config.random_seed if config.random_seed is not None else secrets.randbits(31)
        if config.random_seed is None:
            log.info("random seed %d (--random-seed repeats it)", self.seed)
        began = time.perf_counter()
        model = model or load_model(config, self.seed)
        self.weight_load_s = time.perf_counter() - began
        built = build_engine(config, model, self.seed)
        self.model, self.runner, self.scheduler, self.info = built.model, built.runner, built.scheduler, built.info
        self.memory = built.memory
        self.weight_version = config.weight_version
        self.records: dict[str, Record] = {}
        self.in_flight: list[PendingStep] = []
        self.counters = Counters()
        self.deliveries = Deliveries(self.runner.gather_routes, self.counters)
        blocks = self.model.spec.blocks
        self.blocks = blocks and BlockPasses(
            self.scheduler,
            self.deliveries,
            self.counters,
            length=blocks.length,
            mask_id=blocks.mask_id,
            confidence=config.block_confidence,
        )
        self.ready: list[RequestOutput] = []
        self.paused = False
        self.holding = False
        self.held: list[EngineRequest] = []
        self.grammars = Grammars(
            config.tokenizer_path or config.model_path, self.info.vocab_size, self.info.eos_token_ids
        )
        self.states: dict[str, GrammarState] = {}
        self.compiling: dict[str, tuple[EngineRequest, Future[Any]]] = {}
        self.wake: Callable[[], None] = lambda: None  # called from another thread when a grammar was compiled
        self.depth = 0 if config.disable_overlap_schedule or self.model.device.type == "cpu" else 1

    # what front ends ask

    def add(self, request: EngineRequest, compiled: Any = None) -> None:
        """Queue a request; what makes it impossible comes back as its final output. Held while weights change.

        One with a grammar waits until it is compiled, then comes again with it.
        """
        if self.holding:
            self.held.append(request)
            return
        try:
            if request.return_routed_experts and not self.info.recording:
                raise UserError(
                    "no routes are recorded here; start with --enable-return-routed-experts to ask for them"
                )
            if self.blocks is not None:
                self.records[request.rid] = self.blocks.begin(request)
                return
            if request.sampling.constrained and compiled is None:
                future = self.grammars.compile(request.sampling)
                self.compiling[request.rid] = (request, future)
                future.add_done_callback(lambda _: self.wake())
                return
            sequence = self.scheduler.add(request)
        except TracklayerError as error:
            self._refuse(request, error)
            return
        if compiled is not None:
            self.states[request.rid] = GrammarState(compiled, request)
        self.records[request.rid] = Record(request, sequence)

    def _refuse(self, request: EngineRequest, error: TracklayerError) -> None:
        self.ready.append(failed(request.rid, str(error), error.status, len(request.input_ids)))

    def _take_compiled(self) -> None:
        """Queue the requests whose grammars are compiled; a bad grammar ends its request."""
        for rid in [rid for rid, (_, future) in self.compiling.items() if future.done()]:
            request, future = self.compiling.pop(rid)
            error = future.exception()
            if error is None:
                self.add(request, future.result())
            elif isinstance(error, TracklayerError):
                self._refuse(request, error)
            else:
                raise error

    def abort(self, rid: str, message: str = "Aborted") -> None:
        """End a request with what it has; unknown rid: nothing."""
        record = self.records.get(rid)
        if record is None:
            self._abort_held(rid)
            return
        if not record.started:
            message = "Abort in waiting queue"
        ended = self.scheduler.abort(rid, FinishReason("abort", message=message))
        assert ended is not None, f"{rid} has a record and no sequence"
        self._close([ended if record.blocks is None else final_slots(record, ended)])

    def finish(self, rid: str, keep: int, reason: FinishReason) -> None:
        """End a request after its first `keep` output tokens."""
        record = self.records.get(rid)
        if self.blocks is not None and record is not None:
            ended = self.blocks.finish(record, keep, reason)
        else:
            ended = self.scheduler.finish(rid, keep, reason)
        self._close([ended] if ended else [])

    def release(self) -> None:
        """Queue the requests that came while `holding`."""
        self.holding = False
        held, self.held = self.held, []
        for request in held:
            self.add(request)

    def _abort_held(self, rid: str) -> None:
        """End a request that waits for the weights or for its grammar."""
        waiting = [request for request in self.held if request.rid == rid]
        self.held = [request for request in self.held if request.rid != rid]
        if rid in self.compiling:
            waiting.append(self.compiling.pop(rid)[0])
        for request in waiting:
            reason = FinishReason("abort", message="Abort in waiting queue")
            self.ready.append(RequestOutput(rid, [], len(request.input_ids), 0, reason))

    # the loop's body

    @property
    def blocked(self) -> bool:
        """No step may run: generation is paused, or memory that it needs was released."""
        return self.paused or bool(self.memory.released)

    @property
    def has_work(self) -> bool:
        """Something can be done now: a step, a commit, a delivery."""
        return bool(
            self.in_flight
            or self.deliveries
            or self.ready
            or any(future.done() for _, future in self.compiling.values())
            or (not self.blocked and self.scheduler.has_work)
        )

    def step(self) -> list[RequestOutput]:
        """Plan and launch one step, commit what is due, return what there is to tell."""
        self._take_compiled()
        if self._awaits_token():
            self.drain()
        plan = None if self.blocked else self.scheduler.plan()
        self.save_preempted()
        if plan is not None:
            self.counters.steps += 1
            self._note_admitted(plan)
            self.in_flight.append(self.runner.launch(plan, self._mask(plan)))
        while len(self.in_flight) > (self.depth if plan is not None else 0):
            self._commit(self.in_flight.pop(0))
        self.deliveries.fetch()
        self.ready += self.deliveries.arrived(wait=plan is None and not self.ready)
        out, self.ready = self.ready, []
        return out

    def _note_admitted(self, plan: StepPlan) -> None:
        now = time.perf_counter()
        for share in plan.shares:
            if share.admitted is not None:
                record = self.records[share.rid]
                record.queue_s = now - record.added if record.queue_s is None else record.queue_s

    def drain(self) -> None:
        """Commit everything that is in flight."""
        while self.in_flight:
            self._commit(self.in_flight.pop(0))

    def _awaits_token(self) -> bool:
        """Whether a token that a grammar must see before the next one is sampled is still on its way."""
        return bool(self.states) and any(
            share.rid in self.states for pending in self.in_flight for share in pending.plan.shares
        )

    def _mask(self, plan: StepPlan) -> StepMask | None:
        bound = bool(self.states) and any(share.samples and share.rid in self.states for share in plan.shares)
        return StepMask(self.states, self.info.vocab_size) if bound else None

    def save_preempted(self) -> None:
        """Rows of tokens that were already given out win over those that recomputing them will write."""
        for sequence, slots in self.scheduler.take_preempted():
            self.counters.retractions += 1
            record = self.records.get(sequence.rid)
            # Passes over blocks are not told of before their last, so none of their rows was given out.
            if record is not None and record.request.return_routed_experts and record.blocks is None:
                self.deliveries.save(record, slots)

    def _commit(self, pending: PendingStep) -> None:
        result = pending.wait()
        shares = pending.plan.shares
        for index, share in enumerate(shares):
            record = self.records.get(share.rid)
            # A new request may have taken the id of one that ended while its last share was in flight.
            if record is not None and record.sequence.last_step >= pending.plan.step:
                record.started = True
                if index in result.prompt_logprobs and record.blocks is None:
                    record.input_logprobs.append(result.prompt_logprobs[index])
        sampled = {share.rid: n for n, share in enumerate(s for s in shares if s.samples)}
        filled = {shares[n].rid: found for n, found in result.prompt_logprobs.items()} if self.blocks else {}
        news = self.scheduler.commit(pending.plan, result.token_ids)
        ended = []
        for item in news:
            record = self.records[item.seq.rid]
            if self.blocks is not None:
                ended_now = self.blocks.take(record, item, filled.get(item.seq.rid), self.weight_version)
                item = ended_now or Committed(item.seq, None)
            elif item.token is not None:
                record.take(item.token, sampled[item.seq.rid], result, self.weight_version)
                self.counters.generated_tokens += 1
                if item.finish is None:
                    item = self._advance(item, item.token)
            if item.finish is not None:
                ended.append(item)
                continue
            if record.due:
                self.ready.append(record.output())
            if record.request.return_routed_experts and record.blocks is None:
                self.deliveries.offer(record)
        self._close(ended)

    def _advance(self, item: Committed, token: int) -> Committed:
        """Tell the request's grammar, if it has one, of its token; the end of the grammar is the request's."""
        rid = item.seq.rid
        state = self.states.get(rid)
        if state is None:
            return item
        reason = None
        if not state.accept(token):
            message = f"token {token} does not fit the grammar: the model's logits were not numbers"
            reason = FinishReason("abort", message=message, status=500)
        elif state.finished:
            reason = FinishReason("stop", matched=token)
        ended = self.scheduler.finish(rid, len(item.seq.output_ids), reason) if reason else None
        return ended or item

    def _close(self, ended: list[Committed]) -> None:
        """Final outputs of requests that ended; those that asked for routes wait for their rows."""
        outputs, records, slots = [], [], []
        for item in ended:
            record = self.records.pop(item.seq.rid)
            record.closed = True
            self.states.pop(item.seq.rid, None)
            if record.blocks is None:
                record.cut(len(item.seq.output_ids))
            output = record.output(item.finish)
            self._count(record, output)
            if not record.request.return_routed_experts:
                self.ready.append(output)
                continue
            output.routes_start = record.request.routed_experts_start_len
            outputs.append(output)
            records.append(record)
            slots.append(item.slots)
        self.deliveries.close(records, slots, outputs)

    def _count(self, record: Record, output: RequestOutput) -> None:
        self.counters.finished += 1
        self.counters.aborted += output.finish is not None and output.finish.type == "abort"
        self.counters.prompt_tokens += output.prompt_tokens
        self.counters.cached_tokens += output.cached_tokens
