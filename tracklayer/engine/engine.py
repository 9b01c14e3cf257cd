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
from tracklayer.engine.advance import form_of
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
        self.states: dict[str, GrammarState] = {}
        self.advance = form_of(
            self.model.spec.blocks, config.block_confidence, self.scheduler, self.deliveries, self.counters, self.states
        )
        self.ready: list[RequestOutput] = []
        self.paused = False
        self.holding = False
        self.held: list[EngineRequest] = []
        self.grammars = Grammars(
            config.tokenizer_path or config.model_path, self.info.vocab_size, self.info.eos_token_ids
        )
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
            self.advance.check(request)
            if request.sampling.constrained and compiled is None:
                future = self.grammars.compile(request.sampling)
                self.compiling[request.rid] = (request, future)
                future.add_done_callback(lambda _: self.wake())
                return
            self.records[request.rid] = self.advance.begin(request)
        except TracklayerError as error:
            self._refuse(request, error)
            return
        if compiled is not None:
            self.states[request.rid] = GrammarState(compiled, request)

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
        self._close([self.advance.aborted(record, ended)])

    def finish(self, rid: str, keep: int, reason: FinishReason) -> None:
        """End a request after its first `keep` output tokens."""
        record = self.records.get(rid)
        ended = self.advance.finish(record, keep, reason) if record is not None else None
        if ended is not None and ended.finish is not None:
            self._close([ended])

    def release_held(self) -> None:
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
        """Ask for what preempted requests have, before the slots are given to others."""
        kept = []
        for sequence, slots in self.scheduler.take_preempted():
            self.counters.retractions += 1
            record = self.records.get(sequence.rid)
            if record is not None and record.request.return_routed_experts:
                kept.append((record, slots))
        self.advance.preempted(kept)

    def _commit(self, pending: PendingStep) -> None:
        result = pending.wait()
        shares = pending.plan.shares
        for index, share in enumerate(shares):
            record = self.records.get(share.rid)
            # A new request may have taken the id of one that ended while its last share was in flight.
            if record is not None and record.sequence.last_step >= pending.plan.step:
                record.started = True
                self.advance.note(record, result.prompt_logprobs.get(index))
        sampled = {share.rid: n for n, share in enumerate(s for s in shares if s.samples)}
        ended = []
        for news in self.scheduler.commit(pending.plan, result.token_ids):
            rid = news.seq.rid
            record = self.records[rid]
            item = self.advance.take(record, news, result, sampled.get(rid), self.weight_version)
            if item.finish is not None:
                ended.append(item)
                continue
            if record.due:
                self.ready.append(record.output())
            if record.request.return_routed_experts:
                self.advance.offer(record)
        self.advance.settle()
        self._close(ended)

    def _close(self, ended: list[Committed]) -> None:
        """Final outputs of requests that ended; those that asked for routes wait for their rows."""
        outputs, records, slots = [], [], []
        for item in ended:
            record = self.records.pop(item.seq.rid)
            record.closed = True
            self.states.pop(item.seq.rid, None)
            record.cut(self.advance.num_kept(record, item))
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
