"""The check of exact routes, on a CPU: it passes where routes are right and fails where they are not."""

from __future__ import annotations

import exact_routes
import pytest
import tiny
import torch
from engine_tools import prompts, request, run


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3", "gpt_oss"])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    tiny.save(request.param, folder)
    return folder


@pytest.mark.parametrize("chunk", [64, 8])
def test_recorded_is_what_the_reference_chooses(checkpoint, chunk):
    tapped = exact_routes.tapped_core(checkpoint, chunked_prefill_size=chunk)
    run(tapped.core, [request(str(i), p) for i, p in enumerate(prompts(5))])
    exact_routes.compare(tapped).check()


def test_a_shifted_row_is_found(checkpoint):
    tapped = exact_routes.tapped_core(checkpoint)
    run(tapped.core, [request(str(i), p) for i, p in enumerate(prompts(5))])
    pool = tapped.core.runner.caches.pool.tensor_SLK
    pool[1:, 0] = pool[1:, 0].roll(1, 0)
    with pytest.raises(AssertionError):
        exact_routes.compare(tapped).check()


def test_poison_on_page_0_changes_nothing(checkpoint):
    found = []
    for poison in (False, True):
        tapped = exact_routes.tapped_core(checkpoint)
        between = (lambda core, _: exact_routes.poison_page_0(core)) if poison else None
        found.append(run(tapped.core, [request(str(i), p) for i, p in enumerate(prompts(5))], between=between))
        assert torch.isnan(tapped.core.runner.caches.kv[0][0][0]).all() == poison
    for rid, plain in found[0].items():
        assert plain.tokens == found[1][rid].tokens and (plain.routes == found[1][rid].routes).all()
