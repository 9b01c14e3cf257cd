"""SGLang's and vLLM's flags that are not fields of ours: other names, those without meaning here, those we lack.

Names are written with underscores. A flag in LACKING changes results or placement, so only its default is accepted.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from tracklayer.engine.limits import Limits

ALIASES = {
    "model": "model_path",
    "tokenizer": "tokenizer_path",
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "ep": "ep_size",
    "expert_parallel_size": "ep_size",
    "dp": "dp_size",
    "data_parallel_size": "dp_size",
    "pp": "pp_size",
    "pipeline_parallel_size": "pp_size",
    "gpu_memory_utilization": "mem_fraction_static",
    "max_num_seqs": "max_running_requests",
    "max_num_batched_tokens": "chunked_prefill_size",
    "max_model_len": "context_length",
    "enforce_eager": "disable_cuda_graph",
    "no_enable_prefix_caching": "disable_radix_cache",
    "seed": "random_seed",
    "cuda_graph_max_bs_decode": "cuda_graph_max_bs",
    "cuda_graph_bs_decode": "cuda_graph_bs",
    "enable_sleep_mode": "enable_memory_saver",
    "max_logprobs": "max_top_logprobs",
    "log_requests_format": "log_format",
    "enable_prompt_tokens_details": "enable_cache_report",
}

# Accepted, with one line that says why nothing happens.
WITHOUT_EFFECT = {
    **dict.fromkeys(
        (
            "attention_backend",
            "prefill_attention_backend",
            "decode_attention_backend",
            "mm_attention_backend",
            "sampling_backend",
            "moe_runner_backend",
            "moe_a2a_backend",
            "deepep_mode",
            "disable_shared_experts_fusion",
            "disable_custom_all_reduce",
            "enable_torch_compile",
            "cuda_graph_bs",
            "cuda_graph_backend_decode",
            "cuda_graph_backend_prefill",
            "num_continuous_decode_steps",
            "enable_mixed_chunk",
            "max_prefill_tokens",
            "schedule_conservativeness",
            "schedule_policy",
            "torch_compile_max_bs",
            "triton_attention_reduce_in_fp32",
            "disable_piecewise_cuda_graph",
            "disable_outlines_disk_cache",
            "max_micro_batch_size",
            "prefill_max_requests",
            "weight_loader_disable_mmap",
        ),
        "Tracklayer chooses this itself",
    ),
    **dict.fromkeys(
        (
            "nccl_port",
            "dist_init_addr",
            "nccl_init_addr",
            "dist_timeout",
            "watchdog_timeout",
            "decode_log_interval",
            "enable_p2p_check",
            "enable_symm_mem",
            "enable_nccl_nvls",
            "enable_expert_parallel",
            "disaggregation_bootstrap_port",
            "disaggregation_transfer_backend",
        ),
        "not needed on one device",
    ),
    **dict.fromkeys(
        ("max_loras_per_batch", "max_lora_rank", "lora_target_modules", "lora_backend"), "there are no adapters"
    ),
    **dict.fromkeys(
        (
            "speculative_draft_model_path",
            "speculative_num_steps",
            "speculative_eagle_topk",
            "speculative_num_draft_tokens",
        ),
        "there is no speculation",
    ),
    "enable_priority_scheduling": "priorities are always honoured",
    "grammar_backend": "xgrammar is the only one",
    "enable_draft_weights_cpu_backup": "there is no draft model",
    "tokenizer_worker_num": "one tokenizer serves all",
    "enable_auto_tool_choice": "tool calls need no switch",
    "generation_config": "the checkpoint's is read",
    "skip_server_warmup": "there is no warm-up request",
    "load_balance_method": "there is one replica",
    "gpu_id_step": "an engine runs on one GPU",
    "enable_deterministic_inference": "equal seed and position always sample equally; "
    "that log-probabilities do not depend on the batch to the last bit is not promised",
    "revision": "the model path is a directory, taken as it is",
    "scheduling_policy": "priorities are always honoured, equal ones in order of arrival",
}

# Not there; the default alone is accepted.
LACKING: dict[str, Any] = {
    "quantization": None,
    "kv_cache_dtype": "auto",
    "logprobs_mode": "processed_logprobs",
    "dp_size": 1,
    "pp_size": 1,
    "moe_dp_size": 1,
    "moe_dense_tp_size": 1,
    "weight_transfer_config": None,
    "attn_dp_size": 1,
    "nnodes": 1,
    "node_rank": 0,
    "enable_dp_attention": False,
    "enable_dp_lm_head": False,
    "enable_eplb": False,
    "ep_num_redundant_experts": 0,
    "rl_on_policy_target": None,
    "cpu_offload_gb": 0,
    "custom_weight_loader": None,
    "model_loader_extra_config": "{}",
    "enable_return_hidden_states": False,
    "enable_custom_logit_processor": False,
    "enable_lora": None,
    "lora_paths": None,
    "speculative_algorithm": None,
    "disaggregation_mode": "null",
    "enable_hierarchical_cache": False,
}

# The HTTP server's alone: trainers give them to an Engine too, where they mean nothing.
SERVER_FLAGS = frozenset(
    (
        "host",
        "port",
        "api_key",
        "admin_api_key",
        "sampling_defaults",
        "tool_call_parser",
        "reasoning_parser",
        "incremental_streaming_output",
        "stream_response_default_include_usage",
        "return_routed_experts_by_default",
        "enable_cache_report",
        "enable_metrics",
        "log_level_http",
        "log_requests",
        "log_requests_level",
        "log_format",
        "enable_trace",
        "otlp_traces_endpoint",
        "weight_paths",
        "profile_dir",
        "max_body_bytes",
        *(f.name for f in fields(Limits)),
        "drain_timeout_s",
        "engine_process",
    )
)


def plain_name(flag: str) -> str:
    """--Tensor-Parallel-Size -> tp_size."""
    name = flag.lstrip("-").replace("-", "_").lower()
    return ALIASES.get(name, name)


def foreign(name: str, value: Any) -> str | None:
    """The warning line for a flag that has no effect here; None when there is nothing to say.

    Raises KeyError for a name in neither table, ValueError for one that is lacking and not at its default.
    """
    if name in WITHOUT_EFFECT:
        return f"{_dashes(name)} has no effect: {WITHOUT_EFFECT[name]}"
    default = LACKING[name]
    if value == default or str(value).lower() in (str(default).lower(), "none", "null"):
        return None
    raise ValueError(f"{_dashes(name)} {value}: not available in Tracklayer; leave it out (only {default} is accepted)")


def unknown_flag(name: str, known: Iterable[str]) -> str:
    """The error text for an unknown flag, with the nearest known one."""
    names = [*known, *ALIASES, *WITHOUT_EFFECT, *LACKING]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"; did you mean {_dashes(near[0])}?" if near else "; --help lists the flags"
    return f"unknown flag {_dashes(name)}{hint}"


def _dashes(name: str) -> str:
    return "--" + name.replace("_", "-")
