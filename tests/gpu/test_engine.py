"""The whole engine on a GPU: graphs, eager, chunked and overlapped runs of tiny models, and no waiting in between."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import tiny
import torch
from engine_tools import make_core, prompts, request, run

from tracklayer.engine.operations import Operations

pytestmark = pytest.mark.gpu

WIDE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
PROMPTS = prompts(8, (5, 23, 40))
NUM_NEW = 24


@pytest.fixture(scope="module", params=["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe"])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    tiny.save(request.param, folder, **WIDE)
    return folder


def results(folder, **config):
    core = make_core(folder, **{"device": "cuda", **config})
    return core, run(core, [request(str(i), p, tokens=NUM_NEW, return_logprob=True) for i, p in enumerate(PROMPTS)])


def agreement(a, b) -> tuple[float, float]:
    """Share of equal tokens up to the first difference of each request, and of equal expert sets before it."""
    same = total = sets = compared = 0
    for rid, one in a.items():
        other = b[rid]
        first = next(
            (i for i, (x, y) in enumerate(zip(one.tokens, other.tokens, strict=False)) if x != y), len(one.tokens)
        )
        same, total = same + first, total + len(one.tokens)
        rows = len(PROMPTS[int(rid)]) + first - 1
        x, y = np.sort(one.routes[:rows], -1), np.sort(other.routes[:rows], -1)
        sets, compared = sets + (x == y).all(-1).sum(), compared + x[..., 0].size
    return same / total, sets / compared


def test_float32_on_the_gpu_equals_the_cpu(checkpoint):
    """Every way of running on the GPU in float32 against the plain CPU run."""
    _, plain = results(checkpoint, device="cpu")
    for config in ({}, {"disable_cuda_graph": True}, {"chunked_prefill_size": 8}, {"disable_overlap_schedule": True}):
        _, found = results(checkpoint, dtype="float32", **config)
        tokens, routes = agreement(plain, found)
        assert tokens >= 0.97 and routes >= 0.995, (config, tokens, routes)


def test_bfloat16_graphs_equal_eager(checkpoint):
    """At a captured batch size, graph and eager run the same kernels on the same shapes: bit for bit."""
    _, graph = results(checkpoint, dtype="bfloat16")
    _, eager = results(checkpoint, dtype="bfloat16", disable_cuda_graph=True)
    tokens, routes = agreement(graph, eager)
    assert tokens >= 0.9 and routes >= 0.98, (tokens, routes)


def test_padding_writes_nothing_that_is_read(checkpoint):
    """Five sequences in a graph of six: page 0 takes what the padded line writes, real rows are whole."""
    core = make_core(checkpoint, device="cuda", dtype="float32")
    assert 5 not in core.runner.graphs.sizes
    found = run(core, [request(str(i), p, tokens=NUM_NEW) for i, p in enumerate(PROMPTS[:5])])
    alone = run(core, [request("0", PROMPTS[0], tokens=NUM_NEW)])
    assert found["0"].tokens == alone["0"].tokens


def test_no_waiting_for_the_device_in_the_steady_state(checkpoint):
    """Once decoding, the only synchronisation of a step is the wait for the step before's tokens."""
    core = make_core(checkpoint, device="cuda", dtype="bfloat16")
    for i, prompt in enumerate(PROMPTS):
        core.add(request(str(i), prompt, tokens=NUM_NEW))
    for _ in range(6):
        core.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            core.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def held_bytes() -> int:
    """What this process keeps of the device, beside others' tests on it, without what the allocator could return."""
    gc.collect()  # engines of tests before this one
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


@pytest.mark.parametrize("backup", [False, True])
def test_memory_on_loan_leaves_the_device_and_comes_back(checkpoint, backup):
    """What is released is free for other processes; the same graphs' worth of work gives the same answers after."""
    options = {"enable_memory_saver": True, "enable_weights_cpu_backup": backup, "max_total_tokens": 200_000}
    core, before = results(checkpoint, dtype="bfloat16", **options)
    operations = Operations(core)
    sizes = core.memory.usage_bytes
    assert min(sizes.values()) > 0
    held = held_bytes()
    operations.release_memory()
    assert core.runner.graphs is None and core.runner.mixed is None
    gained = held - held_bytes()
    assert gained > 0.9 * (sizes["kv_cache"] + sizes["weights"]), (gained, sizes)
    operations.resume_memory(["weights"])
    assert core.runner.graphs is None, "graphs need the caches too"
    operations.resume_memory(["kv_cache", "cuda_graph"])
    assert core.runner.graphs is not None and core.runner.graphs.sizes
    after = run(core, [request(str(i), p, tokens=NUM_NEW, return_logprob=True) for i, p in enumerate(PROMPTS)])
    for rid, one in before.items():
        assert after[rid].tokens == one.tokens and (after[rid].routes == one.routes).all()
    for _ in range(3):  # nothing stays behind of each loan
        operations.release_memory()
        operations.resume_memory()
    assert held_bytes() - held < 32 << 20
