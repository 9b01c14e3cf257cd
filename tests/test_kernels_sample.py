"""Sampling's torch reference: the rule by brute force, the noise by hand, the frequencies by counting."""

from __future__ import annotations

import math

import pytest
import torch

from tracklayer.kernels.sample import apply_penalties, exponential_noise, filter_threshold, logprobs_of, sample

ALL = 1 << 30


def settings(rows, temperature=1.0, top_k=ALL, top_p=1.0, min_p=0.0, seeds=None, positions=None):
    full = lambda value, dtype: torch.full((rows,), value, dtype=dtype)  # noqa: E731
    return dict(
        temperature_N=full(temperature, torch.float32), top_k_N=full(top_k, torch.int32),
        top_p_N=full(top_p, torch.float32), min_p_N=full(min_p, torch.float32),
        seeds_N=torch.arange(rows) if seeds is None else seeds,
        positions_N=full(3, torch.int32) if positions is None else positions,
    )  # fmt: skip


def test_greedy_takes_the_lowest_of_equal_ids_and_never_nan():
    logits = torch.tensor([[1.0, 5, 5, 2], [math.nan, -1, -1, -2], [math.inf, 1, math.inf, 0], [-math.inf] * 4])
    kw = settings(4, temperature=0.0)
    assert sample(logits, **kw, all_greedy=True, any_filter=False).tolist() == [1, 1, 0, 0]
    assert sample(logits, **kw, all_greedy=False, any_filter=True).tolist() == [1, 1, 0, 0]
    kw = settings(4, top_k=1)
    assert sample(logits, **kw, all_greedy=False, any_filter=True).tolist() == [1, 1, 0, 0]


def mix(x):
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)


@pytest.mark.parametrize(
    "seed,position", [(0, 0), (1, 0), (-1, 5), (2**40 + 17, 99_999), (-(2**63), 1), (2**63 - 1, 7)]
)
def test_noise_is_the_hash_in_plain_integers(seed, position):
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    key0 = mix(mix(mix(low) ^ high) ^ position)
    key1 = mix(mix(mix(high ^ 0x5BD1E995) ^ position) ^ low)
    got = exponential_noise(torch.tensor([seed]), torch.tensor([position], dtype=torch.int32), 200)[0]
    for token in (0, 1, 57, 199):
        x = token ^ key0
        x = ((x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF) ^ key1
        x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
        x ^= x >> 16
        u = ((x & 0x7FFFFFFF) + 0.5) / 2**31
        assert float(got[token]) == pytest.approx(-math.log1p(-u), rel=1e-4)


def test_noise_is_exponential_and_independent():
    noise = exponential_noise(torch.arange(64), torch.arange(64).int(), 20_000)
    assert float(noise.min()) > 0 and bool(noise.isfinite().all())
    assert float(noise.mean()) == pytest.approx(1, abs=0.01) and float(noise.var()) == pytest.approx(1, abs=0.03)
    correlation = torch.corrcoef(noise)
    assert float((correlation - torch.eye(64)).abs().max()) < 0.05  # 4 sigma of 20,000 draws are 0.028


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature):
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, -3.0])
    draws = 40_000
    ids = sample(logits.expand(draws, 5), **settings(draws, temperature), all_greedy=False, any_filter=False)
    want = (logits / temperature).softmax(-1)
    got = torch.bincount(ids.long(), minlength=5) / draws
    assert bool(((got - want).abs() < 5 * (want * (1 - want) / draws).sqrt() + 1e-4).all()), (got, want)


def test_equal_seed_and_position_sample_equally_in_any_batch():
    logits = torch.randn(40, 300)
    seeds, positions = torch.randint(-(2**62), 2**62, (40,)), torch.randint(0, 1000, (40,)).int()
    kw = settings(40, 0.8, 50, 0.9, 0.01, seeds, positions)
    together = sample(logits, **kw, all_greedy=False, any_filter=True)
    for i in range(40):
        alone = {k: v[i : i + 1] for k, v in kw.items()}
        assert sample(logits[i : i + 1], **alone, all_greedy=False, any_filter=True).tolist() == [int(together[i])]
    moved = {**kw, "positions_N": positions + 1}
    assert sample(logits, **moved, all_greedy=False, any_filter=True).tolist() != together.tolist()


def kept_by_hand(z, top_k, top_p, min_p):
    """Token by token, in Python floats: the rule of the module's docstring."""
    z = z.tolist()
    by_k = [i for i, x in enumerate(z) if sum(y > x for y in z) < top_k]
    weight = {i: math.exp(z[i] - max(z)) for i in by_k}
    whole = sum(weight.values())
    by_p = [i for i in by_k if top_p >= 1 or sum(w for j, w in weight.items() if z[j] > z[i]) < top_p * whole]
    return {i for i in by_p if math.exp(z[i] - max(z)) >= min_p}


@pytest.mark.parametrize("top_k", [ALL, 1, 3, 10])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.1, 1.0])
def test_filters_keep_what_the_rule_says(top_k, top_p, min_p):
    torch.manual_seed(0)
    z = torch.cat([2 * torch.randn(4, 40), torch.randn(4, 40).round()])  # the second half is full of ties
    kw = settings(8, 1.0, top_k, top_p, min_p)
    threshold = filter_threshold(z, kw["top_k_N"], kw["top_p_N"], kw["min_p_N"])
    for row, least in zip(z, threshold, strict=True):
        got = {i for i, x in enumerate(row) if x >= least}
        assert got == kept_by_hand(row, top_k, top_p, min_p)
    seen = [
        sample(z, **{**kw, "positions_N": torch.full((8,), p, dtype=torch.int32)}, all_greedy=False, any_filter=True)
        for p in range(30)
    ]
    for i, row in enumerate(z):
        assert {int(ids[i]) for ids in seen} <= kept_by_hand(row, top_k, top_p, min_p)


@pytest.mark.parametrize("head", [1, 8, 60])
def test_filters_find_the_same_with_few_tokens_sorted(head):
    z = torch.cat([2 * torch.randn(4, 300), torch.randn(4, 300).round(), 0.01 * torch.randn(2, 300)])
    for top_k, top_p, min_p in ((ALL, 0.9, 0.0), (5, 1.0, 0.0), (100, 0.5, 0.02), (ALL, 0.999, 0.0), (ALL, 1.0, 0.3)):
        kw = settings(10, 1.0, top_k, top_p, min_p)
        filters = kw["top_k_N"], kw["top_p_N"], kw["min_p_N"]
        few, every = filter_threshold(z, *filters, head), filter_threshold(z, *filters, 300)
        assert (z >= few[:, None]).equal(z >= every[:, None])


def test_logprobs():
    logits = torch.randn(4, 50)
    temperature = torch.tensor([0.0, 1.0, 0.5, 3.0])
    ids = torch.tensor([3, 0, 49, 7], dtype=torch.int32)
    chosen, top_ids, top = logprobs_of(logits, temperature, ids, 4)
    for i, t in enumerate([1.0, 1.0, 0.5, 3.0]):
        want = (logits[i].double() / t).log_softmax(-1)
        assert float(chosen[i]) == pytest.approx(float(want[ids[i]]), abs=1e-5)
        order = sorted(range(50), key=lambda j: -float(want[j]))[:4]
        assert top_ids[i].tolist() == order and top[i].tolist() == pytest.approx(
            [float(want[j]) for j in order], abs=1e-5
        )
    assert [x.shape[1] for x in logprobs_of(logits, temperature, ids, 0)[1:]] == [0, 0]


def test_penalties():
    logits = torch.tensor([[2.0, -2.0, 1.0, -1.0, 0.5]])
    counts = torch.tensor([[0, 3, 1, 0, 0]], dtype=torch.int16)
    seen = torch.tensor([[True, False, False, True, False]])
    got = apply_penalties(logits, counts, seen, *(torch.tensor([x]) for x in (0.5, 0.25, 2.0)))
    assert got.tolist() == [[1.0, -4.0 - 1.5 - 0.25, 0.5 - 0.5 - 0.25, -2.0, 0.5]]
    assert logits.tolist() == [[2.0, -2.0, 1.0, -1.0, 0.5]]
