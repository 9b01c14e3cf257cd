"""From logits to the step's tokens and log-probabilities. N sampled rows, V vocabulary, k top log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tracklayer.kernels.sample import GREEDY_BELOW, apply_penalties, logprobs_of, sample
from tracklayer.runner.rows import Rows
from tracklayer.types import TOP_K_ALL, EngineRequest, Share

NEG_INF = float("-inf")


@dataclass(slots=True)
class Sampled:
    """Device tensors of one step: ids_N int32, and log-probabilities when a row asked."""

    ids_N: Tensor
    logprobs_N: Tensor | None = None
    top_ids_Nk: Tensor | None = None
    top_logprobs_Nk: Tensor | None = None
    given: dict[int, Tensor] = field(default_factory=dict)


class TokenMask(Protocol):
    """Says which tokens rows may take; asked once the forward was launched, so that it works beside the device."""

    def fill(self, shares: list[Share]) -> tuple[np.ndarray, np.ndarray]:
        """(indices int64 [G] into shares, mask int32 [G, ceil(V / 32)]): bit v % 32 of word v // 32 allows token v."""


class Sampler:
    """Samples the rows of a step. Sampling numbers of an unchanged set of rows are uploaded once."""

    def __init__(self, rows: Rows, device: torch.device) -> None:
        self.rows = rows
        self.device = device
        self._key: tuple[int, bytes] | None = None
        self._uploaded: dict[str, Tensor] = {}

    def __call__(
        self, logits_NV: Tensor, shares: list[Share], rows_N: Tensor, mask: TokenMask | None = None
    ) -> Sampled:
        """logits_NV of the shares' last tokens; rows_N int32 are their rows, on the device."""
        requests = [self.request(share) for share in shares]
        host_rows = np.array([share.row for share in shares], np.int64)
        numbers = {name: values[host_rows] for name, values in self.rows.sampling.items()}
        tensors = self._upload(host_rows, numbers)
        logits_NV = self._edit(logits_NV, shares, requests, rows_N, tensors, numbers)
        if mask is not None:
            logits_NV = apply_mask(logits_NV, *mask.fill(shares))
        ids_N = sample(
            logits_NV,
            temperature_N=tensors["temperature"],
            top_k_N=tensors["top_k"],
            top_p_N=tensors["top_p"],
            min_p_N=tensors["min_p"],
            seeds_N=tensors["seed"],
            positions_N=torch.from_numpy(np.array([s.start + s.num_tokens for s in shares], np.int32)).to(
                self.device, non_blocking=True
            )
            if (numbers["temperature"] > 0).any()
            else rows_N,
            all_greedy=not (numbers["temperature"] > 0).any(),
            any_filter=bool(((numbers["top_k"] < TOP_K_ALL) | (numbers["top_p"] < 1) | (numbers["min_p"] > 0)).any()),
        )
        self.rows.count_output(rows_N, ids_N)
        return self._logprobs(logits_NV, ids_N, requests, tensors["temperature"])

    def request(self, share: Share) -> EngineRequest:
        request = self.rows.requests[share.row]
        assert request is not None, f"row {share.row} was never admitted"
        return request

    def _upload(self, host_rows: np.ndarray, numbers: dict[str, np.ndarray]) -> dict[str, Tensor]:
        key = (self.rows.admissions, host_rows.tobytes())
        if key != self._key:
            self._uploaded = {k: torch.from_numpy(v).to(self.device, non_blocking=True) for k, v in numbers.items()}
            self._key = key
        return self._uploaded

    def _edit(
        self,
        logits_NV: Tensor,
        shares: list[Share],
        requests: list[EngineRequest],
        rows_N: Tensor,
        tensors: dict[str, Tensor],
        numbers: dict[str, np.ndarray],
    ) -> Tensor:
        """Logit bias, stop tokens barred below min_new_tokens, penalties. Copies when it changes anything."""
        if (numbers["frequency"] != 0).any() or (numbers["presence"] != 0).any() or (numbers["repetition"] != 1).any():
            counts_RV, seen_RV = self.rows.output_counts_RV, self.rows.prompt_seen_RV
            assert counts_RV is not None and seen_RV is not None
            index = rows_N.long()
            logits_NV = apply_penalties(
                logits_NV,
                counts_RV[index],
                seen_RV[index],
                tensors["frequency"],
                tensors["presence"],
                tensors["repetition"],
            )
        edits = list(_logit_edits(shares, requests))
        if edits:
            logits_NV = logits_NV.float() if logits_NV.dtype != torch.float32 else logits_NV.clone()
            at = torch.tensor([(n, token) for n, token, _ in edits], device=self.device)
            values = torch.tensor([value for _, _, value in edits], device=self.device)
            logits_NV.index_put_((at[:, 0], at[:, 1]), values, accumulate=True)
        return logits_NV

    def _logprobs(
        self, logits_NV: Tensor, ids_N: Tensor, requests: list[EngineRequest], temperature_N: Tensor
    ) -> Sampled:
        sampled = Sampled(ids_N)
        if not any(request.return_logprob for request in requests):
            return sampled
        top_n = max(request.top_logprobs_num for request in requests)
        sampled.logprobs_N, top_ids, top_logprobs = logprobs_of(logits_NV, temperature_N, ids_N, top_n)
        if top_n:
            sampled.top_ids_Nk, sampled.top_logprobs_Nk = top_ids, top_logprobs
        for n, request in enumerate(requests):
            if request.token_ids_logprob:
                sampled.given[n] = given_logprobs(logits_NV[n : n + 1], temperature_N[n : n + 1], request)[0]
        return sampled


def apply_mask(logits_NV: Tensor, rows_G: np.ndarray, mask_GW: np.ndarray) -> Tensor:
    """A copy of the logits in which the tokens of rows_G that mask_GW (see TokenMask) does not allow are -inf."""
    if not len(rows_G):
        return logits_NV
    device, vocabulary = logits_NV.device, logits_NV.shape[1]
    at_G = torch.from_numpy(rows_G).to(device, non_blocking=True)
    words_GW = torch.from_numpy(mask_GW).to(device, non_blocking=True)
    bits_GV = ((words_GW[:, :, None] >> torch.arange(32, dtype=torch.int32, device=device)) & 1).flatten(1)
    barred_GV = bits_GV[:, :vocabulary] == 0
    return logits_NV.index_copy(0, at_G, logits_NV[at_G].masked_fill(barred_GV, NEG_INF))


def _logit_edits(shares: list[Share], requests: list[EngineRequest]) -> Iterator[tuple[int, int, float]]:
    """(sampled index, token id, what to add) of all rows that change logits of single tokens."""
    for n, (share, request) in enumerate(zip(shares, requests, strict=True)):
        for token, value in request.sampling.logit_bias:
            yield n, token, value
        num_output = share.start + share.num_tokens - len(request.input_ids)
        # with a grammar its mask bars them, as far as the grammar can do without
        if num_output < request.sampling.min_new_tokens and not request.sampling.constrained:
            for token in request.stop_token_ids:
                yield n, token, NEG_INF


def given_logprobs(logits_NV: Tensor, temperature_N: Tensor, request: EngineRequest) -> Tensor:
    """float32 [N, g]: log-probabilities of the request's `token_ids_logprob` at N positions (see `logprobs_of`)."""
    ids_g = torch.tensor(request.token_ids_logprob, dtype=torch.long, device=logits_NV.device)
    z_NV = logits_NV.float() / torch.where(temperature_N < GREEDY_BELOW, 1.0, temperature_N)[:, None]
    return z_NV[:, ids_g] - z_NV.logsumexp(-1, keepdim=True)
