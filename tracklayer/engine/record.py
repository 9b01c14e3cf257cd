"""What the engine keeps of one request beside the scheduler's sequence: what was given out, with what came along."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from tracklayer.engine.blocks import BlockRun
from tracklayer.routes.ids import Array
from tracklayer.scheduler.sequence import Sequence
from tracklayer.types import EngineRequest, FinishReason, RequestOutput, StepResult, TokenLogprobs


@dataclass(slots=True)
class Record:
    """Tokens, log-probabilities, weight versions and route rows of one request.

    limit: position after the last token that it may have.
    unsent: output tokens not yet told. spans: (version, first output position, end) half-open, contiguous.
    rows_asked: position after the last row that was asked for; rows_due: more are about to be. rows_TLK: what has
    come, num_kept rows from position routed_experts_start_len on; rows_error: that some of them were never written.
    blocks: how far its blocks are, when the model denoises them.
    added, queue_s: when it was queued (time.perf_counter), and seconds until its first step was planned.
    """

    request: EngineRequest
    sequence: Sequence
    limit: int
    started: bool = False
    unsent: list[int] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    output_logprobs: list[TokenLogprobs] = field(default_factory=list)
    input_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_output: int = 0
    rows_asked: int = 0
    rows_due: bool = False
    rows_TLK: Array | None = None
    num_kept: int = 0
    rows_error: str | None = None
    closed: bool = False
    blocks: BlockRun | None = None
    added: float = field(default_factory=time.perf_counter)
    queue_s: float | None = None

    def __post_init__(self) -> None:
        self.rows_asked = self.request.routed_experts_start_len

    def take(self, token: int, index: int, result: StepResult, version: str) -> None:
        """One more output token: number `index` among those that the step sampled."""
        logprobs = None
        if self.request.return_logprob:
            assert result.logprobs is not None
            k, at = self.request.top_logprobs_num, slice(index, index + 1)
            logprobs = TokenLogprobs(
                token_ids=result.token_ids[at],
                logprobs=result.logprobs[at],
                top_ids=result.top_ids[at, :k] if k and result.top_ids is not None else None,
                top_logprobs=result.top_logprobs[at, :k] if k and result.top_logprobs is not None else None,
                given=result.given[index][None] if index in result.given else None,
            )
        self.append(token, version, logprobs)

    def append(self, token: int, version: str, logprobs: TokenLogprobs | None) -> None:
        """One more output token, with its log-probabilities if they were asked for."""
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1], self.num_output + 1)
        else:
            self.spans.append((version, self.num_output, self.num_output + 1))
        self.num_output += 1
        self.unsent.append(token)
        if logprobs is not None:
            self.output_logprobs.append(logprobs)

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
            queue_s=time.perf_counter() - self.added if self.queue_s is None else self.queue_s,
        )
        if self.request.return_logprob:
            output.output_logprobs = join_logprobs(logprobs)
            if self.input_logprobs:
                output.input_logprobs = join_logprobs(self.input_logprobs)
                self.input_logprobs = []
        return output

    def keep_rows(self, rows_TLK: Array) -> None:
        """Copy the next rows out of the buffer that they came in."""
        if self.rows_TLK is None:
            # Room for all that may come; the system gives memory only for what is written.
            most = self.limit - self.request.routed_experts_start_len
            self.rows_TLK = np.empty((most, *rows_TLK.shape[1:]), rows_TLK.dtype)
        self.rows_TLK[self.num_kept : self.num_kept + len(rows_TLK)] = rows_TLK
        self.num_kept += len(rows_TLK)

    def whole_rows(self) -> Array:
        """All rows that the finished request returns."""
        assert self.rows_TLK is not None, "no rows have come"
        return self.rows_TLK[: min(self.num_kept, max(0, self.num_rows - self.request.routed_experts_start_len))]


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
