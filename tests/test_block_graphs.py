"""Passes over blocks in graphs of fixed sizes: padded steps against eager ones, on a CPU (see replayed.py)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_tools import make_core, prompts, request, run
from exact_routes import poison_page_0
from replayed import replays, with_graphs
from test_block_diffusion import LENGTH, MASK, MODELS, save

from tracklayer.errors import SelfTestError
from tracklayer.layers.router import TopK
from tracklayer.runner.mixed_graphs import Size, block_ladder
from tracklayer.runner.selftest import self_test

UNUSED = 0  # what padded tokens are; in no prompt, and barred from being sampled
PROMPTS = [[1 + t % (MASK - 1) for t in p] for p in prompts(6, (3, 18, 40, 7))]


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("blocks")
    save(request.param, folder)
    return folder


def asked(new: int = 10, **sampling):
    sampling = {"logit_bias": ((UNUSED, -1e9),), **sampling}
    return [
        request(str(i), p, tokens=new, sampling=sampling, return_logprob=True, seed=i) for i, p in enumerate(PROMPTS)
    ]


def same(found, plain):
    for rid, one in plain.items():
        assert found[rid].tokens == one.tokens, rid
        np.testing.assert_array_equal(found[rid].routes, one.routes)
        np.testing.assert_allclose(found[rid].output_logprobs.logprobs, one.output_logprobs.logprobs, atol=1e-4)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("confidence", [0.0, 0.02, 1.0])
def test_graphs_equal_eager(checkpoint, confidence, depth, monkeypatch):
    plain = run(make_core(checkpoint, block_confidence=confidence), asked())
    core = with_graphs(make_core(checkpoint, block_confidence=confidence), monkeypatch)
    core.depth = depth
    same(run(core, asked()), plain)
    counts = replays(core)
    assert core.num_eager == 0, "64 tokens a step: every step has a graph"
    assert sum(counts.values()) == core.counters.steps and sum(n > 0 for n in counts.values()) > 1, counts


@pytest.mark.parametrize("options", [{"page_size": 8}, {"disable_radix_cache": True}, {"max_total_tokens": 90}])
def test_pages_and_retractions(checkpoint, options, monkeypatch):
    options = {"block_confidence": 0.02, "chunked_prefill_size": 16, **options}
    plain = run(make_core(checkpoint, **options), asked())
    core = with_graphs(make_core(checkpoint, **options), monkeypatch)

    def between(core, step):
        if step % 5 == 4:
            core.drain()
            core.scheduler.retract_all()
            core.save_preempted()

    same(run(core, asked(), between=between), plain)
    assert core.num_eager == 0 and core.counters.retractions > 0


def test_sampled_tokens_are_equal_too(checkpoint, monkeypatch):
    sampling = {"temperature": 1.0, "top_k": 20}
    plain = run(make_core(checkpoint), asked(**sampling))
    same(run(with_graphs(make_core(checkpoint), monkeypatch), asked(**sampling)), plain)


def test_padding_reaches_nothing(checkpoint, monkeypatch):
    """Page 0 and the token that padding feeds are NaN: all that padded places compute is NaN."""
    plain = run(make_core(checkpoint, block_confidence=0.02), asked())
    core = with_graphs(make_core(checkpoint, block_confidence=0.02), monkeypatch)
    core.model.decoder.embed_VD.data[UNUSED] = torch.nan
    poison_page_0(core)
    same(run(core, asked(), between=lambda core, _: poison_page_0(core)), plain)
    assert core.num_eager == 0
    outputs = [output_TD for graph, output_TD in core.runner.mixed.graphs.values() if graph.count]
    assert any(output_TD[-1].isnan().all() for output_TD in outputs), "nothing was padded"
    kept = [cache[core.config.page_size :] for caches in core.runner.caches.kv for cache in caches]
    assert all(cache.isfinite().all() for cache in kept), "padding was written past page 0"


def test_a_step_that_no_graph_holds_runs_eagerly(checkpoint, monkeypatch):
    core = with_graphs(make_core(checkpoint, block_confidence=0.02), monkeypatch, largest=2)
    assert max(size.tokens for size in core.runner.mixed.sizes) == 4 * LENGTH
    same(run(core, asked()), run(make_core(checkpoint, block_confidence=0.02), asked()))
    assert core.num_eager > 0 and sum(replays(core).values()) > 0


def test_prefill_only_requests_may_end_inside_a_block(checkpoint, monkeypatch):
    wanted = [request(str(i), p, tokens=0, routed_experts_include_last=True) for i, p in enumerate(PROMPTS)]
    plain = run(make_core(checkpoint), wanted)
    core = with_graphs(make_core(checkpoint), monkeypatch)
    found = run(core, wanted)
    assert core.num_eager == 0
    for rid, one in plain.items():
        assert len(one.routes) == len(PROMPTS[int(rid)])
        np.testing.assert_array_equal(found[rid].routes, one.routes)


def test_the_self_test_runs_every_graph(checkpoint, monkeypatch):
    core = with_graphs(make_core(checkpoint), monkeypatch)
    self_test(core.runner, core.config.page_size)
    assert min(replays(core).values()) > 0, replays(core)
    assert core.runner.mixed.sizes == block_ladder(8, 64, LENGTH)


def test_the_self_test_names_a_graph_that_does_not_record(checkpoint, monkeypatch):
    core = with_graphs(make_core(checkpoint), monkeypatch)
    whole = TopK.store

    def without(self, batch):
        return None if batch.num_tokens_1 is not None and len(batch.token_ids_T) == 24 else whole(self, batch)

    monkeypatch.setattr(TopK, "store", without)
    with pytest.raises(SelfTestError, match=r"CUDA graph of 24 tokens in blocks: layer \d+ did not record"):
        self_test(core.runner, core.config.page_size)


def test_the_ladder():
    assert block_ladder(4, 1000, 4) == [Size(0, 4 * n, min(n, 4)) for n in (1, 2, 3, 4, 6, 8)]
    assert [size.tokens for size in block_ladder(256, 16384, 32)] == [
        32 * n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    ]
    assert block_ladder(8, 10, 4)[-1] == Size(0, 8, 2), "no graph is larger than a step"
    assert block_ladder(8, 16384, 2048) == [], "blocks that a launch is small beside"
    for rows, length in ((1, 4), (7, 32), (300, 4)):
        sizes = block_ladder(rows, 16384, length)
        assert sizes == sorted(set(sizes)) and all(size.tokens % length == 0 for size in sizes)
