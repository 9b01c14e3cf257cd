"""From an EngineConfig to the parts of an engine: model, caches sized to the memory, scheduler, graphs, self-test."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tracklayer.config import EngineConfig, load_generation_config
from tracklayer.engine.client import EngineInfo
from tracklayer.errors import UserError
from tracklayer.runner.kv_cache import (
    Caches,
    SlotCost,
    available_bytes,
    choose_num_slots,
    kv_bytes_per_slot,
    state_bytes_per_row,
)
from tracklayer.runner.load import LoadedModel
from tracklayer.runner.memory import Memory, WeightSource
from tracklayer.runner.runner import Runner
from tracklayer.runner.selftest import self_test
from tracklayer.scheduler.scheduler import Scheduler, SchedulerConfig
from tracklayer.scheduler.sight import Sight, slots_needed

log = logging.getLogger(__name__)

DEFAULT_CHUNK = {"cuda": 16384, "cpu": 1024}


@dataclass(slots=True)
class Built:
    """What `EngineCore` runs on."""

    model: LoadedModel
    runner: Runner
    scheduler: Scheduler
    info: EngineInfo
    memory: Memory


def build_engine(config: EngineConfig, model: LoadedModel, seed: int) -> Built:
    """Size, capture, test. Raises UserError / CheckpointError for what the user must change, SelfTestError."""
    blocks = model.spec.blocks
    if blocks is not None:  # prefixes part between blocks only, and the cache's tree parts them between pages
        config = replace(config, page_size=math.lcm(config.page_size, blocks.length))
    chunk = config.chunked_prefill_size or DEFAULT_CHUNK[model.device.type]
    max_step_tokens = max(model.context_length if chunk == -1 else chunk, config.max_running_requests)
    sight = _sight(config, model)
    caches = _allocate(config, model, max_step_tokens, sight)
    scheduler = Scheduler(
        SchedulerConfig(
            num_slots=caches.num_slots,
            page_size=config.page_size,
            max_running_requests=config.max_running_requests,
            max_step_tokens=max_step_tokens,
            context_length=model.context_length,
            max_queued_requests=config.max_queued_requests,
            prefix_cache=_prefix_cache(config, model),
            block_length=blocks.length if blocks is not None else 1,
            num_window_slots=caches.num_window_slots,
            sight=sight,
        )
    )
    runner = Runner(model, caches, config.max_running_requests)
    capture = None
    if model.device.type == "cuda" and not config.disable_cuda_graph:
        capture = partial(_capture, config, runner, max_step_tokens)
        capture()
    tested = "off"
    if caches.pool is not None and not config.skip_route_selftest:
        self_test(runner, config.page_size)
        tested = "passed"
    elif caches.pool is not None:
        tested = "skipped"
        log.warning("the route self-test was skipped: nothing has checked that this configuration records every route")
    path = None if config.load_format == "dummy" else config.model_path
    memory = Memory(runner, WeightSource(path, seed, config.enable_weights_cpu_backup), capture)
    return Built(model, runner, scheduler, _info(config, model, scheduler.config, tested), memory)


def _capture(config: EngineConfig, runner: Runner, max_step_tokens: int) -> None:
    largest = min(config.cuda_graph_max_bs or config.max_running_requests, config.max_running_requests)
    runner.capture_graphs(largest, max_step_tokens)
    cost = runner.capture_cost
    assert cost is not None
    log.info("captured %d CUDA graphs in %.1f s, %.2f GiB", cost.num_graphs, cost.seconds, cost.num_bytes / 2**30)


def _prefix_cache(config: EngineConfig, model: LoadedModel) -> bool:
    """Whether prompts may reuse cached prefixes: not where a token's state is gone once the next one was read."""
    if model.decoder.recurrents and not config.disable_radix_cache:
        log.info("prefix reuse is off: %s keeps recurrent state, which no cache slot holds", model.family.name)
    return not config.disable_radix_cache and not model.decoder.recurrents


def _sight(config: EngineConfig, model: LoadedModel) -> Sight | None:
    """How far windowed layers look back; None: there are none, or they keep every token too."""
    seen = [a.sight for a in model.decoder.attentions if a.sight is not None]
    chunks = {chunk for _, chunk in seen if chunk}
    if not seen or config.disable_hybrid_swa_memory or model.spec.blocks is not None or len(chunks) > 1:
        return None
    window = max(window or 0 for window, _ in seen)
    return Sight(window=window or None, chunk=chunks.pop() if chunks else None)


def _allocate(config: EngineConfig, model: LoadedModel, max_step_tokens: int, sight: Sight | None) -> Caches:
    """Caches as large as the memory allows once the largest step's own needs were measured."""
    attentions, recurrents = model.decoder.attentions, model.decoder.recurrents
    routes = model.route_shape if config.enable_return_routed_experts else None
    rows, size = config.max_running_requests, config.page_size
    pool_bytes = routes.bytes_per_token if routes else 0
    window_bytes = kv_bytes_per_slot([a for a in attentions if a.sight is not None], model.dtype)
    cost = SlotCost(
        kept=kv_bytes_per_slot([a for a in attentions if a.sight is None], model.dtype) + pool_bytes,
        windowed=window_bytes,
        window_least=slots_needed(sight, max_step_tokens, min(rows, max_step_tokens), size) if sight else None,
    )
    reserve = _activation_bytes(model, max_step_tokens + rows) if model.device.type == "cuda" else 0
    state_bytes = (rows + 1) * state_bytes_per_row(recurrents, model.dtype)
    budget = available_bytes(model.device, config.mem_fraction_static) - reserve - state_bytes
    if recurrents and budget <= 0:
        raise UserError(
            f"recurrent states of {rows} requests take {state_bytes / 2**30:.2f} GiB, more than "
            "is left beside the weights; lower --max-running-requests"
        )
    num_slots = choose_num_slots(budget, cost, size, config.max_total_tokens, rows * model.context_length)
    window_slots = cost.window_slots(num_slots, size)
    if recurrents:
        log.info("recurrent states: %.2f GiB for %d requests", state_bytes / 2**30, rows)
    total, pool = cost.total(num_slots, size), num_slots * pool_bytes
    log.info(
        "caches: %d slots, KV %.2f GiB, route pool %.3f GiB (%.2f%% of it)",
        num_slots,
        (total - pool) / 2**30,
        pool / 2**30,
        100 * pool / total,
    )
    if window_slots:
        log.info("layers that see a window keep %d slots: %.2f GiB", window_slots, window_slots * window_bytes / 2**30)
    return Caches.allocate(
        num_slots, attentions, routes, model.dtype, model.device, recurrents, rows, num_window_slots=window_slots
    )


def _activation_bytes(model: LoadedModel, num_tokens: int) -> int:
    """Bytes beyond weights and caches that a step of `num_tokens` takes at its peak: measured with a small cache."""
    length = min(num_tokens, model.context_length)
    rows, decoder = -(-num_tokens // length), model.decoder
    caches = Caches.allocate(
        length + 1, decoder.attentions, None, model.dtype, model.device, decoder.recurrents, num_rows=rows
    )
    runner = Runner(model, caches, rows)
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    runner.measure(num_tokens, length)
    peak = torch.cuda.max_memory_allocated(model.device)
    return int(1.1 * (peak - before)) + (256 << 20)


def _info(config: EngineConfig, model: LoadedModel, sizes: SchedulerConfig, tested: str) -> EngineInfo:
    hf, routes = model.hf_config, model.route_shape
    return EngineInfo(
        model_path=config.model_path,
        architecture=hf["architectures"][0],
        model_type=hf.get("model_type", ""),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        vocab_size=model.spec.vocab_size,
        context_length=model.context_length,
        max_total_tokens=sizes.num_slots - sizes.page_size,
        max_request_tokens=sizes.max_request_tokens,
        recording=config.enable_return_routed_experts,
        num_layers=len(model.spec.layers),
        layer_ids=routes.layer_ids,
        num_experts=routes.num_experts,
        top_k=routes.top_k,
        layer_top_k=routes.layer_top_k,
        eos_token_ids=eos_token_ids(config.model_path, hf),
        route_selftest=tested,
    )


def eos_token_ids(model_path: str, hf_config: dict[str, Any]) -> tuple[int, ...]:
    """All EOS ids that generation_config.json and config.json name."""
    found: list[int] = []
    for source in (load_generation_config(model_path), hf_config, hf_config.get("text_config") or {}):
        value = source.get("eos_token_id")
        found += [] if value is None else value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(found))
