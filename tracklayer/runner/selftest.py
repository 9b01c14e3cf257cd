"""The start-up route self-test: every way of running that the engine may use must record what the router chose.

Random tokens go once, whole, through the decoder on the torch reference kernels into a cache of their own: that gives
the reference routes. Then each mode (whole prefill, chunked prefill, eager decode, each CUDA graph) runs the same
tokens through the engine's own caches and pool, and its rows are compared column by column.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from tracklayer.errors import SelfTestError
from tracklayer.kernels.dispatch import reference_kernels
from tracklayer.routes.ids import fill_value
from tracklayer.runner.kv_cache import Caches
from tracklayer.runner.mixed_graphs import MixedGraphs, Size
from tracklayer.runner.runner import Array, Runner
from tracklayer.types import EngineRequest, SamplingParams, Share, StepPlan

log = logging.getLogger(__name__)

PROMPT_TOKENS = 7
# Share of a column's chosen experts that must agree, of many tokens and of fewer than MANY. In float32 only ties may
# differ; in 16 bits near-ties flip, a flip moves what follows, and among few tokens one flip weighs much. A wrong,
# shifted or stale column agrees by chance only (about top_k / num_experts).
MANY = 16
AGREEMENT = {torch.float32: (0.99, 0.99), torch.bfloat16: (0.7, 0.3), torch.float16: (0.8, 0.4)}


@dataclass(slots=True)
class Probe:
    """Random sequences of one length, laid in the cache one after another from page 1 on."""

    tokens_BT: Array
    page_size: int

    def slots(self, b: int) -> Array:
        length = self.tokens_BT.shape[1]
        return np.arange(b * length, (b + 1) * length, dtype=np.int32) + self.page_size

    def share(self, b: int, start: int, end: int, *, sampled: bool = False) -> Share:
        """Positions start..end-1 of sequence b in row b; `sampled`: fed as the token that was sampled before."""
        tokens = self.tokens_BT[b, start:end].tolist()
        request = EngineRequest(rid=f"selftest-{b}", input_ids=tokens, sampling=SamplingParams(temperature=0.0))
        return Share(
            rid=request.rid,
            row=b,
            start=start,
            num_tokens=end - start,
            slots=self.slots(b)[start:end],
            table_start=start,
            token_ids=None if sampled else tokens,
            samples=sampled or end == self.tokens_BT.shape[1],
            admitted=None if sampled else request,
        )

    def plan(self, shares: list[Share]) -> StepPlan:
        return StepPlan(0, shares, np.empty((0, 2), np.int32))


def self_test(runner: Runner, page_size: int) -> None:
    """Raises SelfTestError naming mode and layer when a mode's rows are missing or not the reference router's."""
    began = time.perf_counter()
    pool = runner.caches.pool
    assert pool is not None
    num_slots = min(pool.tensor_SLK.shape[0], runner.caches.num_window_slots or pool.tensor_SLK.shape[0])
    largest = _most_sequences(runner)
    length = 2 * block_length(runner) if block_length(runner) > 1 else PROMPT_TOKENS + 1
    count = min(largest, (num_slots - page_size) // length)
    if count < 1:
        raise SelfTestError(f"the cache of {num_slots} slots is too small for the route self-test")
    generator = np.random.default_rng(0)
    tokens_BT = generator.integers(0, runner.model.spec.vocab_size, (count, length))
    probe = Probe(tokens_BT, page_size)
    reference_BTLK = _reference(runner, probe)
    for mode, sequences, positions in _modes(runner, probe):
        slots = np.concatenate([probe.slots(b)[positions] for b in sequences])
        rows_TLK = pool.tensor_SLK[torch.from_numpy(slots).long().to(runner.device)].cpu().numpy()
        expected_TLK = reference_BTLK[sequences.start : sequences.stop, positions].reshape(rows_TLK.shape)
        needed = AGREEMENT[runner.model.dtype][len(rows_TLK) < MANY]
        _compare(mode, rows_TLK, expected_TLK, pool.shape.layer_ids, needed)
    log.info("route self-test passed in %.1f s", time.perf_counter() - began)


def _modes(runner: Runner, probe: Probe) -> Iterator[tuple[str, range, slice]]:
    """Run each mode in turn; yields its name, and which sequences and positions it has just written."""
    count, last, block = len(probe.tokens_BT), probe.tokens_BT.shape[1] - 1, block_length(runner)
    everyone, few = range(count), range(min(count, MANY))
    whole, prompt, newest = slice(0, last + 1), slice(0, last), slice(last, last + 1)
    graphs, mixed, runner.graphs, runner.mixed = runner.graphs, runner.mixed, None, None
    _run(runner, probe, [probe.share(b, 0, last + 1) for b in few])
    yield "prefill", few, whole
    if block > 1:  # nothing but prefills, cut between blocks
        _run(runner, probe, [probe.share(b, 0, block) for b in everyone])
        _run(runner, probe, [probe.share(b, block, last + 1) for b in everyone])
        yield "chunked prefill", everyone, whole
        for size in mixed.sizes if mixed else ():
            several = range(min(count, size.prompts, size.tokens // block))
            _replay(runner, mixed, size, probe.plan([probe.share(b, 0, block) for b in several]))
            _replay(runner, mixed, size, probe.plan([probe.share(b, block, last + 1) for b in several]))
            yield f"CUDA graph of {size.tokens} tokens in blocks", several, whole
        runner.mixed = mixed
        return
    _run(runner, probe, [probe.share(b, 0, 3) for b in everyone])
    _run(runner, probe, [probe.share(b, 3, last) for b in everyone])
    yield "chunked prefill", everyone, prompt
    kept = [(state, state[:count].clone()) for states in runner.caches.states for state in states]
    _run(runner, probe, _decodes(runner, probe, few, kept))
    yield "eager decode", few, newest
    runner.graphs = graphs
    for lines in graphs.sizes if graphs else ():
        if lines <= count:
            _run(runner, probe, _decodes(runner, probe, range(lines), kept))
            yield f"CUDA graph of {lines}", range(lines), newest
    runner.graphs = None
    for size in mixed.sizes if mixed else ():
        decoding = range(min(size.decodes, -(-count // 2)))
        prompts = range(len(decoding), min(count, len(decoding) + min(size.tokens // (last + 1), size.prompts)))
        decodes = _decodes(runner, probe, decoding, kept) if decoding else []
        _replay(runner, mixed, size, probe.plan([*decodes, *(probe.share(b, 0, last + 1) for b in prompts)]))
        for sequences, positions in ((decoding, newest), (prompts, whole)):
            if sequences:
                yield f"CUDA graph of {size.decodes} decodes and {size.tokens} prompt tokens", sequences, positions
    runner.graphs, runner.mixed = graphs, mixed


def _replay(runner: Runner, mixed: MixedGraphs | None, size: Size, plan: StepPlan) -> None:
    """Run a step in the graph of this size."""
    assert mixed is not None
    sizes, mixed.sizes, runner.mixed = mixed.sizes, [size], mixed
    if mixed.size_for(plan) is None:
        raise SelfTestError(f"the CUDA graph of {size} does not hold the step that would test it")
    runner.launch(plan).wait()
    mixed.sizes, runner.mixed = sizes, None


def _most_sequences(runner: Runner) -> int:
    """Sequences that fill the largest of the engine's graphs."""
    if runner.graphs is not None:
        return runner.graphs.sizes[-1]
    if runner.mixed is not None and runner.mixed.sizes:
        return max(size.prompts for size in runner.mixed.sizes)
    return min(4, runner.rows.scratch)


def block_length(runner: Runner) -> int:
    """Tokens of a block in a model that fills blocks, else 1."""
    blocks = runner.model.spec.blocks
    return blocks.length if blocks is not None else 1


def _run(runner: Runner, probe: Probe, shares: list[Share]) -> None:
    runner.launch(probe.plan(shares)).wait()


def _decodes(
    runner: Runner, probe: Probe, sequences: range, kept: list[tuple[torch.Tensor, torch.Tensor]]
) -> list[Share]:
    """Shares that feed the last token as if it had been sampled, from the states in `kept`; their rows unwritten."""
    for state, before in kept:
        state[: len(before)] = before
    pool, count = runner.caches.pool, len(sequences)
    assert pool is not None and sequences.start == 0
    last = torch.from_numpy(probe.tokens_BT[:count, -1].astype(np.int32)).to(runner.device)
    runner.rows.last_token_R[:count] = last
    slots = torch.from_numpy(np.array([probe.slots(b)[-1] for b in sequences])).to(runner.device)
    pool.fill(slots)
    return [probe.share(b, PROMPT_TOKENS, PROMPT_TOKENS + 1, sampled=True) for b in sequences]


def _reference(runner: Runner, probe: Probe) -> Array:
    """Routes [B, T, L, K] of a whole pass on the torch reference kernels, in caches of its own."""
    count, length = probe.tokens_BT.shape
    model, pool = runner.model, runner.caches.pool
    assert pool is not None
    size = count * length + probe.page_size
    decoder = model.decoder
    caches = Caches.allocate(
        size, decoder.attentions, pool.shape, model.dtype, model.device, decoder.recurrents, num_rows=count
    )
    other = Runner(model, caches, count)
    with reference_kernels():
        _run(other, probe, [probe.share(b, 0, length) for b in range(count)])
    assert caches.pool is not None
    rows_TLK = caches.pool.tensor_SLK[probe.page_size :].cpu().numpy()
    return rows_TLK.reshape(count, length, *rows_TLK.shape[1:])


def _compare(mode: str, rows_TLK: Array, expected_TLK: Array, layer_ids: tuple[int, ...], needed: float) -> None:
    fill = fill_value(rows_TLK.dtype)
    for column, layer in enumerate(layer_ids):
        rows_TK, expected_TK = rows_TLK[:, column], expected_TLK[:, column]
        unwritten = int((rows_TK == fill).all(-1).sum())
        if unwritten or (expected_TK == fill).all(-1).any():
            raise SelfTestError(f"{mode}: layer {layer} did not record {unwritten or 'any'} of {len(rows_TK)} tokens")
        same = (rows_TK[:, :, None] == expected_TK[:, None, :]).any(-1).mean()
        if same < needed:
            raise SelfTestError(
                f"{mode}: layer {layer} recorded experts of which only {same:.0%} are the reference router's"
            )
