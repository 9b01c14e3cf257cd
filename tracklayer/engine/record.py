"""What the engine keeps of one request beside the scheduler's sequence: what was given out, with what came along."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tracklayer.routes.pool import Array, PendingRoutes
from tracklayer.scheduler.sequence import Sequence
from tracklayer.types import EngineRequest, FinishReason, RequestOutput, StepResult, TokenLogprobs


@dataclass(slots=True)
class Record:
    """Tokens, log-probabilities and weight versions of one request, and the rows saved when it was preempted.

    unsent: output tokens not yet told. spans: (version, first output position, end) half-open, contiguous.
    saved: rows of positions 0.. gathered at each preemption; the earlier one wins.
    """

    request: EngineRequest
    sequence: Sequence
    started: bool = False
    unsent: list[int] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    output_logprobs: list[TokenLogprobs] = field(default_factory=list)
    input_logprobs: list[TokenLogprobs] = field(default_factory=list)
    saved: list[PendingRoutes] = field(default_factory=list)
    num_output: int = 0

    def take(self, token: int, index: int, result: StepResult, version: str) -> None:
        """One more output token: number `index` among those that the step sampled."""
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1], self.num_output + 1)
        else:
            self.spans.append((version, self.num_output, self.num_output + 1))
        self.num_output += 1
        self.unsent.append(token)
        if self.request.return_logprob:
            assert result.logprobs is not None
            k, at = self.request.top_logprobs_num, slice(index, index + 1)
            self.output_logprobs.append(
                TokenLogprobs(
                    token_ids=result.token_ids[at],
                    logprobs=result.logprobs[at],
                    top_ids=result.top_ids[at, :k] if k and result.top_ids is not None else None,
                    top_logprobs=result.top_logprobs[at, :k] if k and result.top_logprobs is not None else None,
                    given=result.given[index][None] if index in result.given else None,
                )
            )

    def cut(self, keep: int) -> None:
        """Forget output past the first `keep` tokens (a stop string ended there)."""
        surplus = self.num_output - keep
        if surplus <= 0:
            return
        self.num_output = keep
        del self.unsent[max(0, len(self.unsent) - surplus) :]
        del self.output_logprobs[max(0, len(self.output_logprobs) - surplus) :]
        self.spans = [(version, start, min(end, keep)) for version, start, end in self.spans if start < keep]

    @property
    def due(self) -> bool:
        """Whether it is time for news: the first token's, then every news_interval tokens."""
        return bool(self.unsent) and (self.num_output == 1 or len(self.unsent) >= self.request.news_interval)

    @property
    def num_rows(self) -> int:
        """Position after the last route row to return: every token that was fed, the last sampled one was not."""
        prompt = len(self.request.input_ids)
        if self.num_output == 0:
            return prompt if self.request.routed_experts_include_last else prompt - 1
        return prompt + self.num_output - 1

    def output(self, finish: FinishReason | None = None) -> RequestOutput:
        """The news since the last call."""
        tokens, self.unsent = self.unsent, []
        logprobs, self.output_logprobs = self.output_logprobs, []
        output = RequestOutput(
            rid=self.request.rid,
            new_token_ids=tokens,
            prompt_tokens=len(self.request.input_ids),
            cached_tokens=self.sequence.cached_tokens,
            finish=finish,
            weight_spans=list(self.spans),
            num_retractions=self.sequence.num_retractions,
        )
        if self.request.return_logprob:
            output.output_logprobs = join_logprobs(logprobs)
            if self.input_logprobs:
                output.input_logprobs = join_logprobs(self.input_logprobs)
                self.input_logprobs = []
        return output

    def merge_saved(self, rows_TLK: Array) -> Array:
        """Rows from the pool, with those that were saved at a preemption in their place.

        Each returned row thereby belongs to the forward that gave the log-probability returned with it. A request
        that ended while it waited after a preemption has its rows only here.
        """
        start = self.request.routed_experts_start_len
        for pending in reversed(self.saved):
            (saved_TLK,) = pending.wait()
            saved_TLK = saved_TLK[start : self.num_rows]
            rows_TLK = (
                saved_TLK
                if len(saved_TLK) >= len(rows_TLK)
                else np.concatenate([saved_TLK, rows_TLK[len(saved_TLK) :]])
            )
        return rows_TLK


def join_logprobs(pieces: list[TokenLogprobs]) -> TokenLogprobs | None:
    """One record of consecutive pieces; None of none."""
    if not pieces:
        return None

    def join(name: str) -> Array | None:
        arrays = [getattr(piece, name) for piece in pieces]
        return None if arrays[0] is None else np.concatenate(arrays)

    token_ids, logprobs = join("token_ids"), join("logprobs")
    assert token_ids is not None and logprobs is not None
    return TokenLogprobs(token_ids, logprobs, join("top_ids"), join("top_logprobs"), join("given"))
