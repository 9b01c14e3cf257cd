"""The next token of each row: temperature, top-k, top-p, min-p, penalties, log-probabilities.

N rows, V tokens of the vocabulary.

Rule: z = logits / temperature; keep the top_k largest (all ties of the last one stay); of their softmax keep token i
when the mass of the strictly likelier ones is below top_p; keep those of at least min_p times the likeliest. Of the
kept ones the token with the largest z + Gumbel noise is taken, ties to the lower id. Rows with temperature below 1e-6
or top_k 1 take the largest logit. NaN logits are never taken.
Noise is a counter-based hash of (seed, position, token id) in integers: equal (seed, position) sample equally whatever
the batch and the device (where a float step rounds differently, a near-tie may fall the other way).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracklayer.kernels.dispatch import use_triton
from tracklayer.kernels.sample_kernels import launch_apply_penalties, launch_logprobs_of, launch_sample

NEG_INF = float("-inf")
LARGE = 1e30  # +inf logits become this, so that differences of them are not NaN
GREEDY_BELOW = 1e-6
ROW_TOKENS = 1 << 16  # logits that the reference samples from at once


def sample(
    logits_NV: Tensor,
    *,
    temperature_N: Tensor,
    top_k_N: Tensor,
    top_p_N: Tensor,
    min_p_N: Tensor,
    seeds_N: Tensor,
    positions_N: Tensor,
    all_greedy: bool,
    any_filter: bool,
) -> Tensor:
    """Choose a token per row -> int32 [N].

    logits_NV float32 or the model's dtype; temperature, top_p, min_p float32 [N]; top_k int32 (>= V: all), seeds
    int64, positions int32 [N]. all_greedy: every row is greedy; any_filter: some row has top_k, top_p or min_p.
    """
    run = launch_sample if use_triton(logits_NV) else sample_ref
    return run(
        logits_NV, temperature_N=temperature_N, top_k_N=top_k_N, top_p_N=top_p_N, min_p_N=min_p_N, seeds_N=seeds_N,
        positions_N=positions_N, all_greedy=all_greedy, any_filter=any_filter,
    )  # fmt: skip


def sample_ref(
    logits_NV: Tensor,
    *,
    temperature_N: Tensor,
    top_k_N: Tensor,
    top_p_N: Tensor,
    min_p_N: Tensor,
    seeds_N: Tensor,
    positions_N: Tensor,
    all_greedy: bool,
    any_filter: bool,
) -> Tensor:
    """The torch reference of `sample`; a few rows at a time, so that the noise stays in the processor's cache."""
    if all_greedy:
        return _clean(logits_NV).argmax(-1).to(torch.int32)
    ids = []
    for n in torch.arange(len(logits_NV), device=logits_NV.device).split(max(ROW_TOKENS // logits_NV.shape[1], 1)):
        greedy_N1 = ((temperature_N[n] < GREEDY_BELOW) | (top_k_N[n] == 1))[:, None]
        z_NV = _clean(logits_NV[n]) / torch.where(greedy_N1, 1.0, temperature_N[n][:, None])
        if any_filter:
            least_N = filter_threshold(z_NV, top_k_N[n], top_p_N[n], min_p_N[n])
            z_NV.masked_fill_((z_NV < least_N[:, None]) & ~greedy_N1, NEG_INF)
        # Gumbel noise is -log of an exponential variate; greedy rows take none.
        noise_NV = exponential_noise(seeds_N[n], positions_N[n], logits_NV.shape[1]).log_()
        ids.append((z_NV - noise_NV.masked_fill_(greedy_N1, 0.0)).argmax(-1))
    return torch.cat(ids).to(torch.int32) if ids else torch.empty(0, dtype=torch.int32, device=logits_NV.device)


def _clean(logits_NV: Tensor) -> Tensor:
    return logits_NV.float().nan_to_num(nan=NEG_INF, posinf=LARGE, neginf=NEG_INF)


def filter_threshold(z_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor, head: int = 1024) -> Tensor:
    """float32 [N]: tokens of z_NV (logits over temperature) below it are dropped by top-k, top-p or min-p.

    Only the `head` likeliest tokens are sorted; when a row needs more, all are.
    """
    vocabulary = z_NV.shape[1]
    head = min(head, vocabulary)
    sorted_NS = z_NV.topk(head, -1).values if head < vocabulary else z_NV.sort(-1, descending=True).values
    limited_N = top_k_N < vocabulary
    kth_N1 = sorted_NS.gather(1, (top_k_N.long().clamp(1, head) - 1)[:, None])
    kth_N1 = torch.where(limited_N[:, None], kth_N1, NEG_INF)
    top_N1 = sorted_NS[:, :1]
    whole_N1 = (z_NV - top_N1).exp_().masked_fill_(z_NV < kth_N1, 0.0).sum(-1, keepdim=True)
    mass_NS = (sorted_NS - top_N1).exp().masked_fill(sorted_NS < kth_N1, 0.0) / whole_N1
    under_NS = (mass_NS.cumsum(-1) - mass_NS < top_p_N[:, None]) & (sorted_NS >= kth_N1)
    nucleus_N = top_p_N < 1  # without it nothing is dropped: a sum of the likelier ones may round up to 1
    needs_more = (limited_N & (top_k_N > head)) | (nucleus_N & under_NS.all(-1))
    if head < vocabulary and bool(needs_more.any()):
        return filter_threshold(z_NV, top_k_N, top_p_N, min_p_N, vocabulary)
    by_p_N1 = sorted_NS.gather(1, (under_NS.sum(-1).clamp(min=1) - 1)[:, None])
    by_p_N1 = torch.where(nucleus_N[:, None], by_p_N1, NEG_INF)
    by_min_p_N1 = top_N1 + min_p_N[:, None].log()
    return torch.maximum(torch.maximum(kth_N1, by_p_N1), by_min_p_N1)[:, 0]


# lowbias32 of github.com/skeeto/hash-prospector: an integer mixing function with low bias; as signed int32.
_M1, _M2 = 0x7FEB352D, 0x846CA68B - (1 << 32)


def _shift_xor(x: Tensor, bits: int) -> Tensor:
    """x ^ (x >> bits) on the unsigned 32-bit value that the int32 tensor x stands for."""
    return x ^ ((x >> bits) & ((1 << (32 - bits)) - 1))


def _mix(x: Tensor) -> Tensor:
    return _shift_xor(_shift_xor(_shift_xor(x, 16) * _M1, 15) * _M2, 16)


def noise_keys(seeds_N: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor]:
    """Two int32 [N] keys from int64 seeds and int32 positions."""
    low, high = seeds_N.to(torch.int32), (seeds_N >> 32).to(torch.int32)
    position = positions_N.to(torch.int32)
    return _mix(_mix(_mix(low) ^ high) ^ position), _mix(_mix(_mix(high ^ 0x5BD1E995) ^ position) ^ low)


def exponential_noise(seeds_N: Tensor, positions_N: Tensor, vocabulary: int) -> Tensor:
    """float32 [N, V]: an exponential variate of rate 1 per (seed, position, token id), never 0 nor infinite."""
    key0_N, key1_N = noise_keys(seeds_N, positions_N)
    ids_V = torch.arange(vocabulary, dtype=torch.int32, device=seeds_N.device)
    x = _shift_xor(ids_V[None] ^ key0_N[:, None], 16) * _M1 ^ key1_N[:, None]
    x = _shift_xor(_shift_xor(x, 15) * _M2, 16)
    u = ((x & 0x7FFFFFFF).float() + 0.5) * 2.0**-31
    # -log(1 - u): near 0 the series, because 1 - u has lost the digits that decide who wins.
    series = u * (1.0 + u * (0.5 + u * (1 / 3 + u * 0.25)))
    return torch.where(u < 2.0**-5, series, -torch.log((1.0 - u).clamp(min=2.0**-26)))


def logprobs_of(logits_NV: Tensor, temperature_N: Tensor, ids_N: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-softmax after temperature (greedy rows at temperature 1), of the tokens ids_N and of the top_n likeliest.

    Returns (logprob float32 [N], top ids int32 [N, top_n], top logprobs float32 [N, top_n]); ids_N any integer dtype.
    """
    if use_triton(logits_NV):
        return launch_logprobs_of(logits_NV, temperature_N, ids_N, top_n)
    return logprobs_of_ref(logits_NV, temperature_N, ids_N, top_n)


def logprobs_of_ref(
    logits_NV: Tensor, temperature_N: Tensor, ids_N: Tensor, top_n: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The torch reference of `logprobs_of`."""
    temperature_N = torch.where(temperature_N < GREEDY_BELOW, 1.0, temperature_N)
    z_NV = logits_NV.float() / temperature_N[:, None]
    total_N1 = z_NV.logsumexp(-1, keepdim=True)
    chosen_N = (z_NV.gather(1, ids_N.long()[:, None]) - total_N1)[:, 0]
    top, ids = z_NV.topk(top_n, -1)
    return chosen_N, ids.to(torch.int32), top - total_N1


def apply_penalties(
    logits_NV: Tensor,
    counts_output_NV: Tensor,
    seen_prompt_NV: Tensor,
    frequency_N: Tensor,
    presence_N: Tensor,
    repetition_N: Tensor,
) -> Tensor:
    """Logits less the penalties, float32 [N, V]; the input is not changed.

    counts_output_NV: how often each token was given out (any integer dtype); seen_prompt_NV bool: it is in the
    prompt; frequency, presence, repetition float32 [N]. Repetition divides a positive logit, multiplies a negative
    one, for tokens of prompt or output; frequency and presence count the output only.
    """
    run = launch_apply_penalties if use_triton(logits_NV) else apply_penalties_ref
    return run(logits_NV, counts_output_NV, seen_prompt_NV, frequency_N, presence_N, repetition_N)


def apply_penalties_ref(
    logits_NV: Tensor,
    counts_output_NV: Tensor,
    seen_prompt_NV: Tensor,
    frequency_N: Tensor,
    presence_N: Tensor,
    repetition_N: Tensor,
) -> Tensor:
    """The torch reference of `apply_penalties`."""
    logits_NV = logits_NV.float()
    given_NV = counts_output_NV > 0
    factor_NV = torch.where(given_NV | seen_prompt_NV, repetition_N[:, None], 1.0)
    logits_NV = torch.where(logits_NV > 0, logits_NV / factor_NV, logits_NV * factor_NV)
    return logits_NV - frequency_N[:, None] * counts_output_NV - presence_N[:, None] * given_NV
