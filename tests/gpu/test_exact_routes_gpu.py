"""On a GPU: routes of graphs, eager, chunked and overlapped runs are the reference's choice on what each router read.

Ids are compared exactly; only rows in which the order of summing could change the choice may differ, and few do:
each case prints both counts (`pytest -rP`).
"""

from __future__ import annotations

import exact_routes
import numpy as np
import pytest
import tiny
import torch
from engine_tools import prompts, request, run

pytestmark = pytest.mark.gpu

WIDE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
FAMILIES = {"qwen3_moe": WIDE, "mixtral": WIDE, "deepseek_v3": {"hidden_size": 128}, "gpt_oss": {"hidden_size": 128}}
MODES = {
    "graphs, overlapped": {},
    "graphs, not overlapped": {"disable_overlap_schedule": True},
    "eager": {"disable_cuda_graph": True},
    "eager, not overlapped": {"disable_cuda_graph": True, "disable_overlap_schedule": True},
    "chunked": {"chunked_prefill_size": 16},
    "chunked, eager": {"chunked_prefill_size": 16, "disable_cuda_graph": True},
}
PROMPTS = prompts(5, (5, 23, 40))  # five sequences: the graph of six has a padded line


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    tiny.save(request.param, folder, **FAMILIES[request.param])
    return folder


def requests():
    return [request(str(i), p, tokens=16, return_logprob=True) for i, p in enumerate(PROMPTS)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("mode", MODES)
def test_recorded_is_what_the_reference_chooses(checkpoint, mode, dtype):
    tapped = exact_routes.tapped_core(checkpoint, device="cuda", dtype=dtype, **MODES[mode])
    results = run(tapped.core, requests())
    assert all(len(r.routes) == len(PROMPTS[int(rid)]) + 15 for rid, r in results.items())
    torch.cuda.synchronize()
    exact_routes.compare(tapped).check()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_poisoned_padding_stays_on_page_0(checkpoint, dtype):
    """NaN in page 0 after every step: tokens, log-probabilities and routes are bit for bit those without it."""
    found = []
    for poison in (False, True):
        tapped = exact_routes.tapped_core(checkpoint, device="cuda", dtype=dtype, disable_overlap_schedule=True)
        graphs = tapped.core.runner.graphs
        assert graphs is not None and graphs.size_for(5) == 6, "nothing is padded"
        between = (lambda core, _: exact_routes.poison_page_0(core)) if poison else None
        if poison:
            exact_routes.poison_page_0(tapped.core)
        results = run(tapped.core, requests(), between=between)
        torch.cuda.synchronize()
        exact_routes.compare(tapped).check()
        kept = [caches[0][tapped.core.config.page_size :] for caches in tapped.core.runner.caches.kv]
        assert all(cache.isfinite().all() for cache in kept), "poison left page 0"
        found.append(results)
    for rid, plain in found[0].items():
        other = found[1][rid]
        assert plain.tokens == other.tokens
        assert np.array_equal(plain.output_logprobs.logprobs, other.output_logprobs.logprobs)
        assert np.array_equal(plain.routes, other.routes)


def test_poisoned_hidden_state_of_a_padded_line(checkpoint):
    """The padded line feeds the scratch row's token: one whose embedding is NaN, so that all it computes is NaN."""
    found = []
    for poison in (False, True):
        tapped = exact_routes.tapped_core(checkpoint, device="cuda", dtype="bfloat16", disable_overlap_schedule=True)
        rows, embedding = tapped.core.runner.rows, tapped.core.model.decoder.embed_VD
        unused = next(t for t in range(len(embedding)) if all(t not in p for p in PROMPTS))
        if poison:
            embedding.data[unused] = torch.nan

        def lay(core, _, unused=unused, rows=rows):
            rows.last_token_R[rows.scratch] = unused

        results = run(tapped.core, requests(), between=lay)
        if any(unused in r.tokens for r in results.values()):
            pytest.skip("the model generated the poisoned token")
        found.append(results)
    for rid, plain in found[0].items():
        assert plain.tokens == found[1][rid].tokens and np.array_equal(plain.routes, found[1][rid].routes)
