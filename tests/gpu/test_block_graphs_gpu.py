"""Block diffusion on a GPU: passes in CUDA graphs, eager ones, and the CPU's; rows, padding, and no waiting between.

Tokens are compared block by block, each block after the CPU's own tokens, so that one near tie moves one block only.
"""

from __future__ import annotations

import exact_routes
import numpy as np
import pytest
import torch
from engine_tools import make_core, prompts, request, run
from parity_gpu import BOUNDS, share
from test_block_diffusion import LENGTH, MASK, MODELS, save

from tracklayer.engine.operations import Operations

pytestmark = pytest.mark.gpu

UNUSED = 0  # what padded tokens are; in no prompt, and barred from being sampled
SAMPLING = {"logit_bias": ((UNUSED, -1e9),)}
PROMPTS = [[1 + t % (MASK - 1) for t in p] for p in prompts(5, (3, 18, 40, 7))]
NEW = 24
MODES = {
    "graphs": {},
    "graphs, not overlapped": {"disable_overlap_schedule": True},
    "eager": {"disable_cuda_graph": True},
    "chunked": {"chunked_prefill_size": 16},
    "pages of 16": {"page_size": 16},
    "no prefix cache": {"disable_radix_cache": True},
}


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("blocks")
    save(request.param, folder, hidden_size=128)
    return folder


def engine(folder, **config):
    return make_core(folder, **{"device": "cuda", "max_total_tokens": 2000, "block_confidence": 0.02, **config})


def asked(**sampling):
    sampling = {**SAMPLING, **sampling}
    return [
        request(str(i), p, tokens=NEW, sampling=sampling, return_logprob=True, seed=i) for i, p in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def made(checkpoint):
    """Whole blocks of prompt and output of each request, as the CPU makes them in float32."""
    found = run(engine(checkpoint, device="cpu", dtype="float32"), asked())
    whole = [p + found[str(i)].tokens for i, p in enumerate(PROMPTS)]
    return [tokens[: len(tokens) // LENGTH * LENGTH] for tokens in whole]


def blocks_after(made):
    """A request for each block of each sequence: the next LENGTH tokens after all that comes before."""
    return [
        request(f"{i}.{at}", tokens[:at], tokens=LENGTH, sampling=SAMPLING)
        for i, tokens in enumerate(made)
        for at in range(LENGTH, len(tokens), LENGTH)
    ]


def rows_of(made):
    return [request(f"rows {i}", tokens, tokens=0, routed_experts_include_last=True) for i, tokens in enumerate(made)]


def answers(core, made):
    """Tokens of every block, and every row of the whole sequences."""
    assert core.info.route_selftest == "passed"
    blocks = run(core, blocks_after(made))
    rows = run(core, rows_of(made))
    return [t for rid in sorted(blocks) for t in blocks[rid].tokens], [rows[rid].routes for rid in sorted(rows)], blocks


def agreement(one, other) -> tuple[float, float]:
    """Shares of equal tokens, and of equal experts in rows of equal inputs."""
    tokens = np.mean(np.array(one[0]) == np.array(other[0]))
    return float(tokens), float(np.mean([share(a, b) for a, b in zip(one[1], other[1], strict=True)]))


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("mode", MODES)
def test_tokens_and_rows_are_the_cpus(checkpoint, made, mode, dtype):
    cpu = answers(engine(checkpoint, device="cpu", dtype=dtype), made)
    core = engine(checkpoint, dtype=dtype, **MODES[mode])
    found = answers(core, made)
    tokens, experts = agreement(cpu, found)
    print(f"{mode}, {dtype}: {tokens:.4f} of {len(cpu[0])} tokens, {experts:.4f} of the experts")
    least = BOUNDS[dtype]
    assert tokens >= least[0] and experts >= least[1], (tokens, experts)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_graphs_equal_eager(checkpoint, made, dtype):
    graph = answers(engine(checkpoint, dtype=dtype), made)
    eager = answers(engine(checkpoint, dtype=dtype, disable_cuda_graph=True), made)
    tokens, experts = agreement(graph, eager)
    print(f"{dtype}: {tokens:.4f} of the tokens, {experts:.4f} of the experts")
    # Padding may choose other tiles: in 16 bits a near tie may fall the other way.
    least = (0.99, 0.999) if dtype == "float32" else (0.9, 0.98)
    assert tokens >= least[0] and experts >= least[1], (tokens, experts)


def test_whole_answers_in_float32(checkpoint):
    """Many passes a block (confidence 1) and one (0), sampled and greedy: whole requests, as the CPU gives them."""
    same = total = 0
    for confidence in (0.0, 0.02, 1.0):
        for sampling in ({}, {"temperature": 1.0, "top_k": 20}):
            options = {"dtype": "float32", "block_confidence": confidence}
            plain = run(engine(checkpoint, device="cpu", **options), asked(**sampling))
            found = run(engine(checkpoint, **options), asked(**sampling))
            for rid, one in plain.items():
                total += 1
                if one.tokens == found[rid].tokens:
                    same += 1
                    assert share(one.routes, found[rid].routes) >= BOUNDS["float32"][1], (rid, confidence, sampling)
                    np.testing.assert_allclose(
                        found[rid].output_logprobs.logprobs, one.output_logprobs.logprobs, atol=1e-3
                    )
    print(f"{same} of {total} answers are equal")
    assert same >= 0.9 * total, f"{same} of {total}"


def test_every_pass_replays_a_graph(checkpoint, monkeypatch):
    from tracklayer.runner import runner

    core = engine(checkpoint, dtype="bfloat16")
    assert core.runner.graphs is None and core.runner.mixed.graphs
    assert core.runner.capture_cost.num_graphs == len(core.runner.mixed.sizes)

    def eager(*_):
        raise AssertionError("a pass that a graph holds was launched kernel by kernel")

    monkeypatch.setattr(runner, "build", eager)
    run(core, asked())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("mode", ["graphs", "eager", "chunked"])
def test_recorded_is_what_the_reference_chooses(checkpoint, mode, dtype):
    options = {"page_size": LENGTH, "block_confidence": 0.02, **MODES[mode]}
    tapped = exact_routes.tapped_core(checkpoint, device="cuda", dtype=dtype, **options)
    results = run(tapped.core, asked())
    assert all(len(r.routes) == len(PROMPTS[int(rid)]) + NEW - 1 for rid, r in results.items())
    torch.cuda.synchronize()
    exact_routes.compare(tapped).check()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_poison_stays_in_the_padding(checkpoint, dtype):
    """NaN in page 0 after every step and in the token that padding feeds: nothing of it is seen anywhere."""
    found = []
    for poison in (False, True):
        core = engine(checkpoint, dtype=dtype, page_size=LENGTH, disable_overlap_schedule=True)
        if poison:
            core.model.decoder.embed_VD.data[UNUSED] = torch.nan
            exact_routes.poison_page_0(core)
        found.append(run(core, asked(), between=lambda c, _, p=poison: p and exact_routes.poison_page_0(c)))
        torch.cuda.synchronize()
        page = core.config.page_size
        kept = [cache[page:] for caches in core.runner.caches.kv for cache in caches]
        assert all(cache.isfinite().all() for cache in kept), "poison left page 0"
    for rid, plain in found[0].items():
        other = found[1][rid]
        assert plain.tokens == other.tokens
        assert np.array_equal(plain.output_logprobs.logprobs, other.output_logprobs.logprobs)
        assert np.array_equal(plain.routes, other.routes)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.9}])
def test_a_pass_waits_for_the_device_once(checkpoint, sampling):
    """Only for the event behind what the pass before it has filled in; `wait` asks for no other."""
    core = engine(checkpoint, dtype="bfloat16", block_confidence=1.0)
    for i, prompt in enumerate(PROMPTS):
        core.add(request(str(i), prompt, tokens=60, sampling=sampling, seed=i))
    for _ in range(8):
        core.step()
    waits, launches, launch = [], [], core.runner.launch

    def counted(plan, mask=None):
        pending = launch(plan, mask)
        launches.append(plan.step)
        pending.done = Counted(pending.done, waits)
        return pending

    core.runner.launch = counted
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(30):
            core.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    core.drain()
    assert len(launches) > 10 and len(waits) == len(launches), (len(waits), len(launches))


class Counted:
    def __init__(self, event, waits):
        self.event, self.waits = event, waits

    def synchronize(self):
        self.waits.append(1)
        self.event.synchronize()


def test_memory_on_loan(checkpoint):
    options = {"enable_memory_saver": True, "enable_weights_cpu_backup": True, "dtype": "bfloat16"}
    core = engine(checkpoint, **options)
    before = run(core, asked())
    assert core.memory.usage_bytes["cuda_graph"] > 0
    operations = Operations(core)
    operations.release_memory()
    assert core.runner.mixed is None and core.runner.capture_cost is None
    operations.resume_memory()
    assert core.runner.mixed is not None and core.runner.mixed.graphs
    after = run(core, asked())
    for rid, one in before.items():
        assert after[rid].tokens == one.tokens and np.array_equal(after[rid].routes, one.routes)
