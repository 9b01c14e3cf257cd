"""Layers that see a window only keep fewer tokens on a GPU too: graphs, eager, chunks and the CPU that keeps all."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from engine_tools import make_core, prompts, request, run
from parity_gpu import wide

pytestmark = pytest.mark.gpu

PROMPTS = prompts(6, (5, 40, 90, 130, 60, 33))
MODES = {
    "graphs": {},
    "not overlapped": {"disable_overlap_schedule": True},
    "eager": {"disable_cuda_graph": True},
    "chunked": {"chunked_prefill_size": 16},
    "pages of 16": {"page_size": 16, "chunked_prefill_size": 48},
}


@pytest.fixture(scope="module", params=["gpt_oss", "mimo_v2", "llama4", "gemma4_moe", "mixtral_window"])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    tiny.save(request.param, folder, **wide(request.param))
    return folder


def asked():
    return [request(str(i), p, tokens=30) for i, p in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def plain(checkpoint):
    return run(make_core(checkpoint, dtype="float32", disable_hybrid_swa_memory=True), asked())


def agreement(found, plain) -> tuple[float, float]:
    """Shares of equal tokens and, up to the first other token, of equal experts."""
    same, experts = [], []
    for rid, one in plain.items():
        got = found[rid]
        same.append(np.mean(np.array(one.tokens) == np.array(got.tokens)))
        alike = next((n for n, pair in enumerate(zip(one.tokens, got.tokens, strict=True)) if pair[0] != pair[1]), 30)
        end = len(PROMPTS[int(rid)]) + alike - 1
        experts.append((one.routes[:end, :, :, None] == got.routes[:end, :, None]).any(-1).mean())
    return float(np.mean(same)), float(np.mean(experts))


@pytest.mark.parametrize("mode", MODES)
def test_equals_the_cpu_that_keeps_all(checkpoint, plain, mode):
    """Twice, so that the second time prefixes are found whose windows are there or gone; NaN where nothing lies."""
    core = make_core(checkpoint, device="cuda", dtype="float32", **MODES[mode])
    windows, launch = core.scheduler.cache.windows, core.runner.launch
    kept = zip(core.runner.caches.kv, core.runner.caches.windowed, strict=True)
    tensors = [tensor for kv, windowed in kept if windowed for tensor in kv]

    def poisoned(plan, *rest):
        free = torch.from_numpy(windows._free[: windows._num_free].astype(np.int64)).cuda()
        slots = (free[:, None] * windows.page_size + torch.arange(windows.page_size, device="cuda")).ravel()
        for tensor in tensors:
            tensor[slots] = float("nan")
        return launch(plan, *rest)

    core.runner.launch = poisoned
    for _ in range(2):
        tokens, experts = agreement(run(core, asked()), plain)
        assert tokens >= 0.98 and experts >= 0.99, (tokens, experts)
