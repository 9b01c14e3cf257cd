"""One sequence of a call while it grows: tokens to text, stop strings, log-probabilities, routes, the end.

A Sample takes the engine's news (`feed`) and is always what the caller may see now. Cut rule: everything (ids,
log-probabilities, routes) ends with the token that completed the stop, whatever the engine made beyond it.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from tracklayer.engine.client import EngineInfo
from tracklayer.engine.detokenizer import StopMatcher, detokenizer_of
from tracklayer.engine.tokenizer import TextTokenizer
from tracklayer.errors import CapacityError, IncompleteRoutes, TracklayerError, UserError
from tracklayer.routes.record import Routes
from tracklayer.types import EngineRequest, FinishReason, RequestOutput, TokenLogprobs

Triple = list[Any]  # [log-probability or None, token id, text or None]


class Sample:
    """State of one EngineRequest as its caller sees it. Times are seconds of time.perf_counter."""

    def __init__(
        self,
        index: int,
        request: EngineRequest,
        info: EngineInfo,
        tokenizer: TextTokenizer | None,
        *,
        text_in_logprobs: bool = False,
    ) -> None:
        self.index = index
        self.request = request
        self.output_ids: list[int] = []
        self.finish: FinishReason | None = None
        self.error: TracklayerError | None = None
        self.cached_tokens = 0
        self.num_retractions = 0
        self.queue_s = 0.0
        self.weight_spans: list[tuple[str, int, int]] = []
        self.routes: Routes | None = None
        self.output_logprobs: list[Triple] = []
        self.output_top: list[list[Triple]] = []
        self.output_given: list[list[Triple]] = []
        self.input_logprobs: list[Triple] = []
        self.input_top: list[list[Triple] | None] = []
        self.input_given: list[list[Triple] | None] = []
        self.arrived = time.perf_counter()
        self.first_token_at: float | None = None
        self.ended_at: float | None = None
        self._info = info
        self._token_text = tokenizer.token_text if tokenizer and text_in_logprobs else None
        self._stopped: FinishReason | None = None
        params = request.sampling
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = detokenizer_of(
                tokenizer,
                request.input_ids,
                skip_special=params.skip_special_tokens,
                spaces_between=params.spaces_between_special_tokens,
            )
        self._matcher = StopMatcher(params.stop, params.stop_regex) if params.stop or params.stop_regex else None
        # a special token never shows in the text, so as a stop string it is found by its id
        specials = tokenizer.special_tokens if tokenizer else {}
        self._special_stops = {specials[s]: s for s in params.stop if s in specials}
        self._final_text: str | None = None

    @property
    def rid(self) -> str:
        return self.request.rid

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.input_ids)

    @property
    def text(self) -> str | None:
        """Text so far, less what a later stop string could still take away. None without a tokenizer."""
        if self._detokenizer is None:
            return None
        if self._final_text is not None:
            return self._final_text
        whole = self._detokenizer.text
        if self._matcher is None or self.request.sampling.no_stop_trim:
            return whole
        return whole[: self._matcher.safe_length(whole)]

    def feed(self, output: RequestOutput) -> tuple[int, FinishReason] | None:
        """Take news. Returns (tokens to keep, reason) when the engine must be told that a stop was found.

        Raises UserError when a stop pattern takes too long, IncompleteRoutes when rows are missing at the end.
        """
        self.cached_tokens = output.cached_tokens
        self.num_retractions = output.num_retractions
        self.queue_s = output.queue_s
        self.weight_spans = output.weight_spans or self.weight_spans
        if output.input_logprobs is not None:
            self._add_input_logprobs(output.input_logprobs)
        ask = None
        if self._stopped is None and self.finish is None:
            if output.new_token_ids and self.first_token_at is None:
                self.first_token_at = time.perf_counter()
                self._open_input_logprobs()
            if output.output_logprobs is not None:
                self._add_output_logprobs(output.output_logprobs)
            matched = self._add_tokens(output.new_token_ids, output.finish)
            if matched is not None:
                self._stopped = FinishReason("stop", matched=matched)
                self._cut(len(self.output_ids))
                ask = (len(self.output_ids), self._stopped)
        if output.finish is not None:
            self._end(output)
            return None
        return ask

    def fail(self, error: TracklayerError) -> None:
        """End without the engine's last word."""
        if self.finish is None:
            self.error = error
            self.finish = FinishReason("abort", message=str(error), status=error.status)
            self._close()

    def _close(self) -> None:
        self.ended_at = time.perf_counter()
        if self._detokenizer is not None and self._final_text is None:
            self._final_text = self._detokenizer.text

    # tokens and text

    def _add_tokens(self, tokens: list[int], finish: FinishReason | None) -> str | None:
        """Append tokens up to the one that completes a stop; returns the stop as the request gave it."""
        hide_last = self._hides_last(finish)
        if self._matcher is None or self._detokenizer is None:
            self.output_ids += tokens
            if self._detokenizer is not None:
                self._detokenizer.push(tokens[:-1] if hide_last else tokens, last=finish is not None)
            return None
        for i, token in enumerate(tokens):
            self.output_ids.append(token)
            last = finish is not None and i == len(tokens) - 1
            matched = self._stop_at(token, hidden=hide_last and last, last=last)
            if matched is not None:
                return matched
        if finish is not None and not tokens:
            self._detokenizer.push((), last=True)
        return None

    def _hides_last(self, finish: FinishReason | None) -> bool:
        """Whether the last token is a stop token that the text leaves out."""
        matched = finish is not None and finish.type == "stop" and isinstance(finish.matched, int)
        return matched and not self.request.sampling.no_stop_trim

    def _stop_at(self, token: int, *, hidden: bool, last: bool) -> str | None:
        detokenizer, matcher, params = self._detokenizer, self._matcher, self.request.sampling
        assert detokenizer is not None and matcher is not None
        counts = len(self.output_ids) >= params.min_new_tokens
        if counts and token in self._special_stops:
            detokenizer.push((token,) if params.no_stop_trim else (), last=True)
            self._final_text = detokenizer.text
            return self._special_stops[token]
        detokenizer.push(() if hidden else (token,), last=last)
        match = matcher.find(detokenizer.text)
        if match is None or not counts:
            return None
        self._final_text = detokenizer.text if params.no_stop_trim else detokenizer.text[: match.position]
        return match.stop

    # log-probabilities

    def _triple(self, logprob: float, token: int) -> Triple:
        value = logprob if math.isfinite(logprob) else None
        return [value, token, self._token_text(token) if self._token_text else None]

    def _triples(self, records: TokenLogprobs) -> tuple[list[Triple], list[list[Triple]], list[list[Triple]]]:
        """(chosen, best k of each position, given ids of each position) of n positions."""
        request = self.request
        chosen = [
            self._triple(p, t) for p, t in zip(records.logprobs.tolist(), records.token_ids.tolist(), strict=True)
        ]
        top: list[list[Triple]] = []
        if request.top_logprobs_num and records.top_ids is not None and records.top_logprobs is not None:
            k = request.top_logprobs_num
            rows = zip(records.top_logprobs[:, :k].tolist(), records.top_ids[:, :k].tolist(), strict=True)
            top = [[self._triple(p, t) for p, t in zip(ps, ts, strict=True)] for ps, ts in rows]
        given: list[list[Triple]] = []
        if request.token_ids_logprob and records.given is not None:
            ids = request.token_ids_logprob
            given = [[self._triple(p, t) for p, t in zip(ps, ids, strict=True)] for ps in records.given.tolist()]
        return chosen, top, given

    def _add_output_logprobs(self, records: TokenLogprobs) -> None:
        chosen, top, given = self._triples(records)
        self.output_logprobs += chosen
        self.output_top += top
        self.output_given += given

    def _add_input_logprobs(self, records: TokenLogprobs) -> None:
        """Values of the prompt's positions after the first one asked for, which has none on the wire."""
        self._open_input_logprobs()
        chosen, top, given = self._triples(records)
        asked = self.prompt_tokens - self.request.logprob_start_len
        skip = len(self.input_logprobs) == 1 and len(chosen) == asked  # with a value for the first position too
        self.input_logprobs += chosen[skip:]
        self.input_top += top[skip:]
        self.input_given += given[skip:]

    def _open_input_logprobs(self) -> None:
        start = self.request.logprob_start_len
        if self.request.return_logprob and start >= 0 and not self.input_logprobs:
            token = self.request.input_ids[start]
            self.input_logprobs = [[None, token, self._token_text(token) if self._token_text else None]]
            self.input_top = [None] if self.request.top_logprobs_num else []
            self.input_given = [None] if self.request.token_ids_logprob else []

    # the end

    def _cut(self, keep: int) -> None:
        for values in (self.output_ids, self.output_logprobs, self.output_top, self.output_given):
            del values[keep:]

    def _end(self, output: RequestOutput) -> None:
        reason = output.finish
        assert reason is not None
        if output.error is not None or (reason.type == "abort" and reason.status is not None):
            message = output.error or reason.message or "the request failed"
            status = reason.status or TracklayerError.status
            kinds = {400: UserError, 503: CapacityError}
            self.error = kinds.get(status, TracklayerError)(message)
            reason = FinishReason("abort", message=message, status=status)
        elif self._stopped is not None:
            reason = self._stopped
        count = len(self.output_ids)
        self.weight_spans = [(v, a, min(b, count)) for v, a, b in self.weight_spans if a < count or a == b == 0]
        if self.request.return_routed_experts and self.error is None:
            self.routes = self._take_routes(output, aborted=reason.type == "abort")
        if reason.type != "abort":
            self._open_input_logprobs()
        self.finish = reason
        self._close()

    def _take_routes(self, output: RequestOutput, *, aborted: bool) -> Routes:
        """Exactly P + C - 1 - start rows (one more with include_last and no output); fewer only after an abort."""
        request, info = self.request, self._info
        start = request.routed_experts_start_len
        last = request.routed_experts_include_last and not self.output_ids
        want = max(0, self.prompt_tokens + len(self.output_ids) - 1 + last - start)
        rows = output.routes
        if rows is None:
            rows = np.empty((0, len(info.layer_ids), info.top_k), np.uint8)
        else:
            assert output.routes_start == start, f"{self.rid}: routes start at {output.routes_start}, asked {start}"
        if len(rows) < want and not aborted:
            missing = list(range(start + len(rows), start + want))
            raise IncompleteRoutes(missing, [info.layer_ids[0]] * len(missing))
        # The gather that brought the rows has counted unwritten ones: no second look at hundreds of megabytes here.
        return Routes(rows[:want], info.layer_ids, info.num_experts, start, layer_top_k=info.layer_top_k, check=False)
