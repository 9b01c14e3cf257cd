"""Runs steps: a StepPlan in, tokens out. Owns the model, the caches, the rows and the CUDA graphs.

`launch` never waits for the device; what it returns does, when asked. All work goes to one stream in the order of
the calls, which is what makes freed slots safe to reuse (docs/architecture.md).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tracklayer.errors import UserError
from tracklayer.kernels.sample import logprobs_of
from tracklayer.routes.pool import Array, PendingRoutes
from tracklayer.runner.batch import build, upload
from tracklayer.runner.blocks import MASKS_AT_ONCE, fill_masks
from tracklayer.runner.graphs import CaptureCost, DecodeGraphs, ladder
from tracklayer.runner.kv_cache import Caches
from tracklayer.runner.load import LoadedModel
from tracklayer.runner.mixed_graphs import MixedGraphs, block_ladder
from tracklayer.runner.mixed_graphs import ladder as mixed_ladder
from tracklayer.runner.rows import Rows, table_arrays
from tracklayer.runner.sampling import Sampled, Sampler, TokenMask, given_logprobs
from tracklayer.types import EngineRequest, SamplingParams, Share, StepPlan, StepResult, TokenLogprobs

PROMPT_LOGITS_AT_ONCE = 1024


@dataclass(slots=True)
class PendingStep:
    """A launched step; its results are on their way to the host."""

    plan: StepPlan
    host: dict[str, Tensor]
    given: dict[int, Tensor] = field(default_factory=dict)
    prompt: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    done: torch.cuda.Event | None = None

    def wait(self) -> StepResult:
        if self.done is not None:
            self.done.synchronize()
        arrays = {name: tensor.numpy() for name, tensor in self.host.items()}
        prompt = {
            share: TokenLogprobs(**{name: tensor.numpy() for name, tensor in tensors.items()})
            for share, tensors in self.prompt.items()
        }
        given = {n: tensor.numpy() for n, tensor in self.given.items()}
        return StepResult(self.plan.step, **arrays, given=given, prompt_logprobs=prompt)


class Runner:
    """Executes plans on one device."""

    def __init__(self, model: LoadedModel, caches: Caches, max_rows: int) -> None:
        self.model = model
        self.decoder = model.decoder
        self.device = model.device
        self.caches = caches
        self.rows = Rows(max_rows, model.context_length, model.device, windowed=bool(caches.num_window_slots))
        self.sampler = Sampler(self.rows, model.device)
        self.graphs: DecodeGraphs | None = None
        self.mixed: MixedGraphs | None = None
        self.capture_cost: CaptureCost | None = None

    @torch.inference_mode()
    def capture_graphs(self, largest: int, max_prompt_tokens: int) -> None:
        """Capture decode steps of up to `largest` sequences, and small steps with prompts (no recurrent state).

        A model that fills blocks has no decode steps.
        """
        began, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        blocks, num_graphs = self.model.spec.blocks, 0
        if blocks is None:
            self.graphs = DecodeGraphs(self.decoder, self.rows, self.caches, ladder(largest), self.device)
            self.graphs.capture()
            num_graphs += len(self.graphs.sizes)
            sizes = mixed_ladder(largest, max_prompt_tokens)
        else:
            sizes = block_ladder(largest, max_prompt_tokens, blocks.length)
        if not self.caches.states:
            self.mixed = MixedGraphs(self.decoder, self.rows, self.caches, sizes, self.device)
            self.mixed.capture()
            num_graphs += len(sizes)
        spent = time.perf_counter() - began
        self.capture_cost = CaptureCost(num_graphs, spent, free - torch.cuda.mem_get_info()[0])

    def drop_graphs(self) -> None:
        """Let go of all graphs and their memory."""
        self.graphs, self.mixed, self.capture_cost = None, None, None

    @torch.inference_mode()
    def launch(self, plan: StepPlan, mask: TokenMask | None = None) -> PendingStep:
        """Start a step; returns at once. `mask`: for steps with rows that a grammar binds.

        Raises UserError when a prompt's activations do not fit the GPU.
        """
        if len(plan.copies):
            both = [plan.copies] if plan.window_copies is None else [plan.copies, plan.window_copies]
            self.caches.copy(*(torch.from_numpy(pairs).to(self.device, non_blocking=True) for pairs in both))
        for share in plan.shares:
            if share.admitted is not None:
                self.rows.admit(share, self.model.spec.vocab_size)
        shares = [share for share in plan.shares if share.samples]
        size = self.graphs.size_for(len(plan.shares)) if self.graphs and self._graph_can(plan) else None
        prompt: dict[int, dict[str, Tensor]] = {}
        if self.graphs is not None and size is not None:
            self._enter_known_tokens(plan.shares)
            logits_NV, rows_N = self.graphs.run(plan.shares, size)
        else:
            hidden_TD, sampled_N, rows_N = self._hidden(plan)
            blocks = self.model.spec.blocks
            if blocks is None:
                prompt = self._prompt_logprobs(plan, hidden_TD)
            else:
                prompt = fill_masks(plan, hidden_TD, self.decoder, self.sampler, blocks.mask_id)
            if not shares:
                return self._send(plan, None, prompt)
            logits_NV = self.decoder.logits(hidden_TD[sampled_N.long()])
        sampled = self.sampler(logits_NV, shares, rows_N, mask)
        self.rows.last_token_R[rows_N.long()] = sampled.ids_N
        return self._send(plan, sampled, prompt)

    @torch.inference_mode()
    def measure(self, num_tokens: int, length: int) -> None:
        """Run a step of `num_tokens` meaningless tokens, in sequences of `length`, to see what memory it takes."""
        shares = []
        for row, start in enumerate(range(0, num_tokens, length)):
            count = min(length, num_tokens - start)
            slots = np.arange(1, count + 1, dtype=np.int32)
            tokens = [t % self.model.spec.vocab_size for t in range(count)]
            sampling = SamplingParams(temperature=0.0)
            request = EngineRequest(rid=f"measure-{row}", input_ids=tokens, sampling=sampling)
            if (blocks := self.model.spec.blocks) is not None:
                request.masked_from = max(0, count - MASKS_AT_ONCE)
                tokens[request.masked_from :] = [blocks.mask_id] * (count - request.masked_from)
            shares.append(Share(request.rid, row, 0, count, slots, 0, tokens, True, admitted=request))
        self.launch(StepPlan(0, shares, np.empty((0, 2), np.int32))).wait()

    def _hidden(self, plan: StepPlan) -> tuple[Tensor, Tensor, Tensor]:
        """Final hidden states [T, width] of a step with prompts, which of them are sampled and their rows, int32 [N].

        Padding may stand among the T tokens of a graph, after those that decode and at the end.
        """
        size = self.mixed.size_for(plan) if self.mixed else None
        if self.mixed is not None and size is not None:
            return self.mixed.run(plan, size)
        batch, sampled_N, rows_N = build(plan, self.rows, self.caches, self.device)
        if self.caches.pool:
            self.caches.pool.fill(batch.slots_T)
        return self.decoder(batch), sampled_N, rows_N

    def _graph_can(self, plan: StepPlan) -> bool:
        return plan.decode_only and all(s.logprobs_from is None for s in plan.shares)

    def _enter_known_tokens(self, shares: list[Share]) -> None:
        """One-token prefill shares run in a decode graph too: lay their token and reused prefix as if sampled."""
        known = [share for share in shares if share.token_ids is not None]
        if known:
            self.rows.enter_prefills(*upload(table_arrays(known, self.rows.num_tables), self.device))
            for share in known:
                assert share.token_ids is not None
                self.rows.last_token_R[share.row] = share.token_ids[0]

    def _prompt_logprobs(self, plan: StepPlan, hidden_TD: Tensor) -> dict[int, dict[str, Tensor]]:
        """Of token q+1 from the hidden state at q, for the prompt positions that the shares ask for."""
        found: dict[int, dict[str, Tensor]] = {}
        offset = 0
        for index, share in enumerate(plan.shares):
            if share.logprobs_from is not None:
                request = self.rows.requests[share.row]
                assert request is not None
                first = max(share.start, share.logprobs_from)
                last = min(share.start + share.num_tokens, len(request.input_ids) - 1)
                if first < last:
                    hidden = hidden_TD[offset + first - share.start : offset + last - share.start]
                    tokens = torch.tensor(
                        request.input_ids[first + 1 : last + 1], device=self.device, dtype=torch.int32
                    )
                    pieces = [
                        self._prompt_piece(h, t, request)
                        for h, t in zip(
                            hidden.split(PROMPT_LOGITS_AT_ONCE), tokens.split(PROMPT_LOGITS_AT_ONCE), strict=True
                        )
                    ]
                    found[index] = {name: torch.cat([p[name] for p in pieces]) for name in pieces[0]}
            offset += share.num_tokens
        return found

    def _prompt_piece(self, hidden_ND: Tensor, tokens_N: Tensor, request: EngineRequest) -> dict[str, Tensor]:
        logits_NV = self.decoder.logits(hidden_ND)
        plain_N = torch.ones(len(tokens_N), device=self.device)
        top_n = request.top_logprobs_num
        logprobs_N, top_ids, top_logprobs = logprobs_of(logits_NV, plain_N, tokens_N, top_n)
        piece = {"token_ids": tokens_N, "logprobs": logprobs_N}
        if top_n:
            piece |= {"top_ids": top_ids, "top_logprobs": top_logprobs}
        if request.token_ids_logprob:
            piece["given"] = given_logprobs(logits_NV, plain_N, request)
        return piece

    def _send(self, plan: StepPlan, sampled: Sampled | None, prompt: dict[int, dict[str, Tensor]]) -> PendingStep:
        """Start the copies to the host."""
        named = {"token_ids": sampled.ids_N if sampled else torch.empty(0, dtype=torch.int32)}
        if sampled is not None and sampled.logprobs_N is not None:
            named["logprobs"] = sampled.logprobs_N
        if sampled is not None and sampled.top_ids_Nk is not None and sampled.top_logprobs_Nk is not None:
            named |= {"top_ids": sampled.top_ids_Nk, "top_logprobs": sampled.top_logprobs_Nk}
        given = sampled.given if sampled else {}
        if self.device.type != "cuda":
            return PendingStep(plan, named, given, prompt)

        def home(tensor: Tensor) -> Tensor:
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

        pending = PendingStep(
            plan,
            {name: home(tensor) for name, tensor in named.items()},
            {n: home(tensor) for n, tensor in given.items()},
            {share: {name: home(t) for name, t in tensors.items()} for share, tensors in prompt.items()},
            torch.cuda.Event(),
        )
        assert pending.done is not None
        pending.done.record()
        return pending

    @torch.inference_mode()
    def gather_routes(self, slots: Sequence[Array], starts: Sequence[int]) -> PendingRoutes:
        """Start bringing routes home; see RoutePool.gather."""
        if self.caches.pool is None:
            raise UserError("this engine does not record routes; start it with enable_return_routed_experts")
        return self.caches.pool.gather(slots, starts)
