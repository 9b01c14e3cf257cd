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
    caches = _allocate(config, model, max_step_tokens + config.max_running_requests)
    num_slots = caches.kv[0][0].shape[0]
    scheduler = Scheduler(
        SchedulerConfig(
            num_slots=num_slots,
            page_size=config.page_size,
            max_running_requests=config.max_running_requests,
            max_step_tokens=max_step_tokens,
            context_length=model.context_length,
            max_queued_requests=config.max_queued_requests,
            prefix_cache=_prefix_cache(config, model),
            block_length=blocks.length if blocks is not None else 1,
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


def _allocate(config: EngineConfig, model: LoadedModel, max_step_tokens: int) -> Caches:
    """Caches as large as the memory allows once the largest step's own needs were measured."""
    attentions, recurrents = model.decoder.attentions, model.decoder.recurrents
    routes = model.route_shape if config.enable_return_routed_experts else None
    kv_bytes = kv_bytes_per_slot(attentions, model.dtype)
    per_slot = kv_bytes + (routes.bytes_per_token if routes else 0)
    reserve = _activation_bytes(model, max_step_tokens) if model.device.type == "cuda" else 0
    state_bytes = (config.max_running_requests + 1) * state_bytes_per_row(recurrents, model.dtype)
    budget = available_bytes(model.device, config.mem_fraction_static) - reserve - state_bytes
    if recurrents and budget <= 0:
        raise UserError(
            f"recurrent states of {config.max_running_requests} requests take {state_bytes / 2**30:.2f} GiB, more than "
            "is left beside the weights; lower --max-running-requests"
        )
    useful = config.max_running_requests * model.context_length
    num_slots = choose_num_slots(budget, per_slot, config.page_size, config.max_total_tokens, useful)
    if recurrents:
        log.info("recurrent states: %.2f GiB for %d requests", state_bytes / 2**30, config.max_running_requests)
    log.info(
        "caches: %d slots, KV %.2f GiB, route pool %.3f GiB (%.2f%% of it)",
        num_slots,
        num_slots * kv_bytes / 2**30,
        num_slots * (per_slot - kv_bytes) / 2**30,
        100 * (per_slot - kv_bytes) / per_slot,
    )
    rows = config.max_running_requests
    return Caches.allocate(num_slots, attentions, routes, model.dtype, model.device, recurrents, rows)


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
