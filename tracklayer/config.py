"""The engine's configuration: one frozen dataclass, validated at birth. The only file that reads the environment.

Command-line flags are generated from the fields (underscores become dashes); `help` in the metadata is their text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tracklayer.errors import CheckpointError, UserError

DTYPES = ("auto", "float32", "bfloat16", "float16")
DTYPE_NAMES = {"half": "float16", "float": "float32", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
IS_OF: dict[str, Callable[[Any], bool]] = {
    "None": lambda v: v is None,
    "str": lambda v: isinstance(v, str),
    "bool": lambda v: isinstance(v, bool),
    "int": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "float": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool),
}
INT64 = 1 << 63


def flag(default: Any, text: str, **extra: Any) -> Any:
    """A field with its help text; extra metadata: choices; low and high, the integers that bound it."""
    return field(default=default, metadata={"help": text, **extra})


def check_flags(config: Any) -> None:
    """Check every field of a dataclass of flags: type, choices, bounds; a path becomes text. Raises UserError."""
    for f in fields(config):
        value = getattr(config, f.name)
        if isinstance(value, os.PathLike):
            object.__setattr__(config, f.name, value := os.fspath(value))
        if not any(IS_OF[kind](value) for kind in str(f.type).split(" | ")):
            raise UserError(f"{f.name} must be of type {f.type}, got {value!r}")
        choices = f.metadata.get("choices")
        if choices and value not in choices:
            known = ", ".join(choice for choice in choices if choice is not None)
            raise UserError(f"{f.name} must be one of {known}; got {value!r}")
        low, high = f.metadata.get("low"), f.metadata.get("high")
        if low is not None and value is not None and (value < low or (high is not None and value > high)):
            wanted = f"an integer in {low}..{high}" if high is not None else "a positive integer"
            raise UserError(f"{f.name} must be {wanted}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that shapes an engine. Names are SGLang's where it has one."""

    model_path: str = flag("", "checkpoint directory in Hugging Face layout")
    tokenizer_path: str | None = flag(None, "tokenizer directory; default: the model path")
    skip_tokenizer_init: bool = flag(False, "token ids in and out only, no text")
    load_format: str = flag(
        "auto", "auto, safetensors, or dummy (seeded random weights)", choices=("auto", "safetensors", "dummy")
    )
    dtype: str = flag("auto", "auto is bfloat16 on a GPU and float32 on a CPU", choices=DTYPES)
    device: str = flag("auto", "auto, cuda or cpu", choices=("auto", "cuda", "cpu"))
    base_gpu_id: int | None = flag(None, "which GPU; default: the current one, which in a new process is 0", low=0)
    router_dtype: str = flag(
        "family", "family: as the model's reference; float32: force it", choices=("family", "float32")
    )
    enable_fp32_lm_head: bool = flag(False, "form logits in float32, whatever the dtype")
    context_length: int | None = flag(None, "longest sequence in tokens; default: from the checkpoint", low=1)
    json_model_override_args: str = flag("{}", "JSON object merged over config.json")
    page_size: int = flag(1, "tokens per KV page; prefix hits are token-exact for every size", low=1)
    max_running_requests: int = flag(256, "requests in one step at most", low=1, high=1 << 16)
    max_queued_requests: int | None = flag(None, "waiting requests at most; beyond it 503", low=0, high=INT64 - 1)
    max_total_tokens: int | None = flag(
        None, "KV slots; default: from measured free memory", low=1, high=(1 << 31) - 1
    )  # slots are int32
    mem_fraction_static: float = flag(0.88, "share of the GPU memory for weights, KV cache and route pool")
    chunked_prefill_size: int | None = flag(
        None, "prompt tokens in one step at most; default 16384 on a GPU, 1024 on a CPU; -1: no limit"
    )
    block_confidence: float = flag(
        0.95, "block diffusion: probability from which a token that a pass sampled stays; the likeliest always does"
    )
    disable_hybrid_swa_memory: bool = flag(
        False, "layers that see a window only keep every token as the others do; default: what can still be seen"
    )
    disable_radix_cache: bool = flag(False, "do not reuse prefixes")
    disable_overlap_schedule: bool = flag(False, "read each step's tokens before the next is planned")
    disable_cuda_graph: bool = flag(False, "run every step eagerly")
    cuda_graph_max_bs: int | None = flag(
        None, "largest decode batch with a CUDA graph; default: max_running_requests", low=1, high=1 << 16
    )
    enable_memory_saver: bool = flag(False, "let /release_memory_occupation give GPU memory to others for a while")
    enable_weights_cpu_backup: bool = flag(
        False, "keep released weights in host memory; default: read their checkpoint again"
    )
    enable_return_routed_experts: bool = flag(False, "record the experts of each token and return them on request")
    skip_route_selftest: bool = flag(False, "start although the routes were not checked (not advised)")
    random_seed: int | None = flag(
        None,
        "seed of dummy weights and of requests without a seed of their own; default: random",
        low=-INT64,
        high=INT64 - 1,
    )
    weight_version: str = flag("default", "version name of the weights loaded at start")
    tp_size: int = flag(1, "tensor-parallel ranks (one device: 1)", low=1)
    ep_size: int = flag(1, "expert-parallel ranks (one device: 1)", low=1)

    def __post_init__(self) -> None:
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", DTYPE_NAMES.get(self.dtype, self.dtype))
        check_flags(self)
        for name in ("tp_size", "ep_size"):
            wanted = getattr(self, name)
            if wanted > 1:
                raise UserError(f"{name} {wanted} was asked for, but an engine runs on one device; use {name} 1")
        if not 0.0 < self.mem_fraction_static < 1.0:
            raise UserError(f"mem_fraction_static must lie between 0 and 1, got {self.mem_fraction_static!r}")
        if not 0.0 <= self.block_confidence <= 1.0:
            raise UserError(f"block_confidence must lie between 0 and 1, got {self.block_confidence!r}")
        chunk = self.chunked_prefill_size
        if chunk is not None and chunk != -1 and chunk < 1:
            raise UserError(f"chunked_prefill_size must be -1 or a positive integer, got {chunk!r}")


def load_model_config(path: str, override: str = "{}") -> dict[str, Any]:
    """The checkpoint's config.json as a dict, with `override` (a JSON object) merged over it.

    Raises CheckpointError when `path` is not a checkpoint directory, UserError for a bad override.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise CheckpointError(
            f"{path!r} is not a checkpoint directory: no config.json in it. "
            "Give a local directory that holds config.json and *.safetensors"
        )
    config = _read_object(file)
    return {**config, **json_object(override, "json_model_override_args")}


def json_object(given: Any, name: str) -> dict[str, Any]:
    """A flag's JSON object, as text or as a dict; None is an empty one. Raises UserError that names the flag."""
    try:
        value = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is not valid JSON: {error}") from error
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{name} must be a JSON object, got {given!r:.200}")
    return value or {}


def load_generation_config(path: str) -> dict[str, Any]:
    """The checkpoint's generation_config.json as a dict, empty when it has none. Raises CheckpointError."""
    file = Path(path) / "generation_config.json"
    return _read_object(file) if file.is_file() else {}


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:  # ValueError: not JSON, or not UTF-8
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object, got {type(value).__name__}")
    return value


def cache_dir() -> Path:
    """The user's cache directory of Tracklayer (XDG_CACHE_HOME/tracklayer)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tracklayer"


def sleep_while_waiting() -> None:
    """Let OpenMP's threads sleep between products instead of spinning, unless the user chose otherwise.

    An engine on a CPU shares its cores with HTTP, clients and others; spinning threads then cost a factor of ten.
    OpenMP reads this once: call it before torch is loaded.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
