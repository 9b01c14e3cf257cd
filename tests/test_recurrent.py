"""Recurrent mixers: scans against loops over tokens in float64, the walk over runs, and state in the whole engine."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from engine_tools import make_core, prompts, request, run
from hypothesis import given, settings
from hypothesis import strategies as st

from tracklayer.errors import SelfTestError, UserError
from tracklayer.layers import recurrent
from tracklayer.layers.batch import Batch, Run
from tracklayer.layers.mixers import recurrent_mixer
from tracklayer.layers.recurrent_spec import (
    GatedDeltaSpec,
    KDASpec,
    Kept,
    LightningSpec,
    Mamba1Spec,
    Mamba2Spec,
    RecurrentSpec,
    ShortConvSpec,
)
from tracklayer.layers.scans import channel_scan, delta_rule, linear_attention
from tracklayer.runner.kv_cache import Caches, state_bytes_per_row
from tracklayer.runner.runs import decode_run, group, run_arrays, runs_of

LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 131, 300, 1100]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def delta_loop(q, k, v, g, beta, state):
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    out = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None]
        wrong = v[:, t] - (k[:, t, :, None] @ state)[:, :, 0]
        state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * wrong)[:, :, None]
        out.append((q[:, t, :, None] @ state)[:, :, 0])
    return torch.stack(out, 1), state


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("strength", [0.05, 5.0, 100.0])  # 100: everything is forgotten at once; exp(-g) would overflow
def test_delta_rule(length, per_channel, strength):
    q, k, v = draw(2, length, 3, 8), F.normalize(draw(2, length, 3, 8, seed=1), dim=-1), draw(2, length, 3, 5)
    g = -strength * draw(2, length, 3, 8 if per_channel else 1).abs()
    beta, state = draw(2, length, 3).sigmoid(), draw(2, 3, 8, 5)
    expected = delta_loop(q, k, v, g, beta, state)
    for found, wanted in zip(delta_rule(q, k, v, g, beta, state), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("strength", [0.05, 100.0])
def test_linear_attention(length, strength):
    q, k, v = draw(2, length, 3, 8), draw(2, length, 3, 8, seed=1), draw(2, length, 3, 5)
    g, state = -strength * draw(2, length, 3).abs(), draw(2, 3, 8, 5)
    found, last = linear_attention(q, k, v, g, state)
    s, out = state.double(), []
    for t in range(length):
        s = s * g[:, t, :, None, None].double().exp() + k[:, t, :, :, None].double() * v[:, t, :, None].double()
        out.append((q[:, t, :, None].double() @ s)[:, :, 0])
    torch.testing.assert_close(found.double(), torch.stack(out, 1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(last.double(), s, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64])
def test_channel_scan(length):
    decay, add, state = draw(2, length, 6, 4).sigmoid(), draw(2, length, 6, 4, seed=1), draw(2, 6, 4)
    kept = decay.clone(), add.clone()
    found, h = channel_scan(decay, add, state), state.double()
    for t in range(length):
        h = decay[:, t].double() * h + add[:, t].double()
        torch.testing.assert_close(found[:, t].double(), h, atol=1e-5, rtol=1e-5)
    assert torch.equal(decay, kept[0]) and torch.equal(add, kept[1]), "the inputs were written to"


def one_run(*counts: int) -> Run:
    tokens = torch.arange(len(counts))[:, None].expand(-1, max(counts))
    fresh = torch.zeros(len(counts), dtype=torch.bool)
    return Run(tokens, torch.tensor(counts), torch.arange(len(counts)), fresh)


@pytest.mark.parametrize("kernel", [2, 3, 4])
def test_causal_conv(kernel):
    """Against conv1d over history and input together; the window ends at the last real token, not at the padding."""
    counts, places = (5, 1, 3), 5
    x, window, weight, bias = draw(3, places, 7), draw(3, kernel - 1, 7), draw(7, kernel), draw(7)
    found, after = recurrent.causal_conv(x, window, weight, bias, one_run(*counts))
    whole = torch.cat([window, x], 1)
    expected = F.conv1d(whole.mT, weight[:, None], bias, groups=7).mT
    torch.testing.assert_close(found, expected)
    for b, count in enumerate(counts):
        torch.testing.assert_close(after[b], whole[b, count : count + kernel - 1])


@given(st.lists(st.integers(1, 300), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_runs_hold_every_token_once(counts):
    counts_B = np.array(counts, np.int32)
    starts_B1 = np.concatenate([[0], np.cumsum(counts_B)]).astype(np.int32)
    rows_B, firsts_B = np.arange(len(counts), dtype=np.int32)[::-1] + 3, np.arange(len(counts), dtype=np.int32) % 2
    arrays = run_arrays(counts_B, starts_B1, rows_B, firsts_B)
    runs, order_T = runs_of([torch.from_numpy(np.asarray(a, np.int32)) for a in arrays])
    flat = torch.cat([r.tokens_BM.flatten() for r in runs])
    assert torch.equal(flat[order_T], torch.arange(starts_B1[-1])), "a token does not find its own place"
    assert len(flat) <= 2 * counts_B.sum() and len(group(counts_B)) <= 10
    assert sorted(torch.cat([r.rows_B for r in runs]).tolist()) == sorted(rows_B.tolist())
    for r in runs:
        b = [int(np.where(rows_B == row)[0][0]) for row in r.rows_B.tolist()]
        assert r.counts_B.tolist() == counts_B[b].tolist()
        assert r.fresh_B.tolist() == (firsts_B[b] == 0).tolist()
        assert r.tokens_BM[:, 0].tolist() == starts_B1[:-1][b].tolist()


MIXERS: list[RecurrentSpec] = [
    GatedDeltaSpec(num_heads=4, num_key_heads=2, key_dim=6, value_dim=5, conv=4),
    Mamba2Spec(num_heads=4, head_dim=5, state=6, groups=2, conv=3),
    ShortConvSpec(width=12, conv=3),
    KDASpec(num_heads=3, head_dim=6, conv=4),
    KDASpec(num_heads=3, head_dim=6, conv=2, low_rank=True, lower_bound=-5.0),
    Mamba1Spec(width=18, state=5, dt_rank=3, conv=4),
    LightningSpec(num_heads=4, head_dim=6, log_decays=(-0.5, -0.25, -0.1, 0.0), groups=2),
]


def run_batch(mixer, x_TD, states, counts: list[int], firsts: list[int]) -> torch.Tensor:
    counts_B = np.array(counts, np.int32)
    starts = np.concatenate([[0], np.cumsum(counts_B)]).astype(np.int32)
    arrays = run_arrays(counts_B, starts, np.arange(len(counts), dtype=np.int32), np.array(firsts, np.int32))
    runs, order_T = runs_of([torch.from_numpy(np.asarray(a, np.int32)) for a in arrays])
    nothing = torch.zeros(0)
    batch = Batch(*[nothing] * 7, max_query=1, max_len=1, states=[states], runs=runs, order_T=order_T)
    return mixer(x_TD, batch)


@pytest.mark.parametrize("spec", MIXERS, ids=lambda s: type(s).__name__)
def test_a_mixer_may_stop_anywhere_and_does_not_see_its_neighbours(spec):
    """Sequences in pieces, in any company, over pools full of NaN: as each alone and whole."""
    mixer = recurrent_mixer(spec, 12, None, 0)
    for n, (_, view, _) in enumerate(mixer.parts()):
        view.copy_(draw(*view.shape, seed=n) * 0.4)
    x = [draw(n, 12, seed=n) for n in (9, 1, 70)]

    def pools(value: float) -> tuple[torch.Tensor, ...]:
        return tuple(torch.full((4, *kept.shape), value) for kept in spec.kept)

    alone = [run_batch(mixer, one, pools(0.0), [len(one)], [0]) for one in x]
    states = pools(float("nan"))
    whole = run_batch(mixer, torch.cat(x), states, [9, 1, 70], [0, 0, 0])
    torch.testing.assert_close(whole, torch.cat(alone), atol=1e-5, rtol=1e-5)
    assert all(pool[3].isnan().all() for pool in states), "a row that is not in the step was written"
    states, done = pools(float("nan")), [[], [], []]
    for counts in ([1, 1, 66], [2, 0, 1], [5, 0, 2], [1, 0, 1]):
        firsts = [sum(len(p) for p in pieces) for pieces in done]
        names = [b for b in range(3) if counts[b]]
        pieces = [x[b][firsts[b] : firsts[b] + counts[b]] for b in names]
        here = tuple(pool[names] for pool in states)
        out = run_batch(mixer, torch.cat(pieces), here, [counts[b] for b in names], [firsts[b] for b in names])
        for pool, rows in zip(states, here, strict=True):
            pool[names] = rows
        for b, piece in zip(names, out.split([counts[b] for b in names]), strict=True):
            done[b].append(piece)
    torch.testing.assert_close(torch.cat([torch.cat(p) for p in done]), torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_decode_run_is_the_run_of_single_tokens():
    rows, lens = torch.tensor([5, 2, 9], dtype=torch.int32), torch.tensor([7, 1, 3], dtype=torch.int32)
    run = decode_run(rows, lens)
    assert run.tokens_BM.tolist() == [[0], [1], [2]] and run.counts_B.tolist() == [1, 1, 1]
    assert run.rows_B.tolist() == [5, 2, 9] and run.fresh_B.tolist() == [False, True, False]


def test_pools_have_a_line_for_each_row_and_one_more():
    spec = MIXERS[0]
    device = torch.device("cpu")
    caches = Caches.allocate(4, [], None, torch.bfloat16, device, [spec], num_rows=6)
    assert [(tuple(t.shape), t.dtype) for t in caches.states[0]] == [
        ((7, 3, 44), torch.bfloat16),
        ((7, 4, 6, 5), torch.float32),
    ]
    assert state_bytes_per_row([spec], torch.bfloat16) == sum(t[0].nbytes for t in caches.states[0])


def test_a_spec_without_a_module_is_refused():
    class Odd(RecurrentSpec):
        kept = (Kept((1,)),)

    with pytest.raises(TypeError, match="no module for Odd"):
        recurrent_mixer(Odd(), 8, None, 0)


VARIANTS = ["qwen3_next", "nemotron_h", "jamba", "lfm2_moe"]
PROMPTS = prompts(6)


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    tiny.save(request.param, folder)
    return folder


@pytest.fixture(scope="module")
def plain(checkpoint):
    core = make_core(checkpoint, disable_overlap_schedule=True)
    found = {}
    for i, prompt in enumerate(PROMPTS):
        found |= run(core, [request(str(i), prompt, tokens=10)])
    return found


def check(results, plain):
    for rid, result in results.items():
        assert result.tokens == plain[rid].tokens, rid
        np.testing.assert_array_equal(result.routes, plain[rid].routes, err_msg=rid)


@pytest.mark.parametrize("chunk", [8, 9, 64])
def test_batched_and_chunked(checkpoint, plain, chunk):
    core = make_core(checkpoint, chunked_prefill_size=chunk)
    for pool in (pool for pools in core.runner.caches.states for pool in pools):
        pool.fill_(float("nan"))  # whoever begins must not read what was there
    check(run(core, [request(str(i), p, tokens=10) for i, p in enumerate(PROMPTS)]), plain)


def test_preempted_requests_begin_anew(checkpoint, plain):
    core = make_core(checkpoint, max_total_tokens=110)
    results = run(core, [request(str(i), PROMPTS[i], tokens=10) for i in (1, 2, 4, 5)])
    assert sum(r.retractions for r in results.values()) > 0, "the cache was large enough: nothing was tested"
    check(results, plain)


def test_no_prefix_is_reused_and_it_is_said(checkpoint, plain, caplog):
    with caplog.at_level(logging.INFO, logger="tracklayer"):
        core = make_core(checkpoint)
    assert sum("prefix reuse is off" in message for message in caplog.messages) == 1
    for _ in range(2):
        results = run(core, [request("2", PROMPTS[2], tokens=10)])
        assert results["2"].cached_tokens == 0
        check(results, plain)


def test_a_state_that_is_not_carried_fails_the_start(checkpoint, monkeypatch):
    monkeypatch.setattr(recurrent, "_kept", lambda pool, run: torch.zeros_like(pool[run.rows_B]))
    with pytest.raises(SelfTestError, match="chunked prefill"):
        make_core(checkpoint)


def test_more_states_than_memory_is_an_error_that_names_the_remedy(checkpoint, monkeypatch):
    monkeypatch.setattr("tracklayer.runner.kv_cache.CPU_CACHE_BYTES", 1 << 20)
    with pytest.raises(UserError, match="--max-running-requests"):
        make_core(checkpoint, max_running_requests=60_000, max_total_tokens=None)
