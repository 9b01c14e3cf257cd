"""Decode graphs and graphs of steps with prompts: padded steps against eager ones, on a CPU (see replayed.py)."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from engine_tools import make_core, prompts, request, run
from exact_routes import poison_page_0
from replayed import replays, with_graphs

from tracklayer.runner.selftest import self_test

UNUSED = 0
PROMPTS = [[1 + t % 96 for t in p] for p in prompts(5, (1, 5, 23, 40))]
SAMPLING = {"logit_bias": ((UNUSED, -1e9),)}


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3", "qwen3_next", "gpt_oss", "llama4"])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    tiny.save(request.param, folder)
    return folder


def asked():
    return [request(str(i), p, tokens=12, sampling=SAMPLING, return_logprob=True) for i, p in enumerate(PROMPTS)]


@pytest.mark.parametrize("depth", [0, 1])
def test_graphs_equal_eager(checkpoint, depth, monkeypatch):
    """Page 0 and what padded places feed are NaN."""
    plain = run(make_core(checkpoint), asked())
    core = with_graphs(make_core(checkpoint), monkeypatch, largest=6)
    core.depth = depth
    core.model.decoder.embed_VD.data[UNUSED] = torch.nan
    poison_page_0(core)
    found = run(core, asked(), between=lambda core, _: poison_page_0(core))
    for rid, one in plain.items():
        assert found[rid].tokens == one.tokens, rid
        np.testing.assert_array_equal(found[rid].routes, one.routes)
        np.testing.assert_allclose(found[rid].output_logprobs.logprobs, one.output_logprobs.logprobs, atol=1e-4)
    decodes = {size: graph.count for size, (graph, _) in core.runner.graphs.graphs.items()}
    assert decodes[6] > 0, "no line was padded"
    if not core.runner.caches.states:
        assert core.num_eager < 4 and sum(replays(core).values()) > 0
    kept = [cache[core.config.page_size :] for caches in core.runner.caches.kv for cache in caches]
    assert all(cache.isfinite().all() for cache in kept), "padding was written past page 0"


def test_the_self_test_runs_every_graph(checkpoint, monkeypatch):
    core = with_graphs(make_core(checkpoint), monkeypatch)
    before = sum(graph.count for graph, _ in core.runner.graphs.graphs.values())
    self_test(core.runner, core.config.page_size)
    assert before == 0 and all(graph.count > 0 for graph, _ in core.runner.graphs.graphs.values())
    if core.runner.mixed is not None:
        assert min(replays(core).values()) > 0
