"""What a front end needs of an engine. The HTTP server and the offline API know the engine by this alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from tracklayer.errors import UserError
from tracklayer.types import EngineRequest, FinishReason, RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts that are fixed once the engine is up; what a front end checks requests against.

    layer_ids: decoder layer index of each column of the routes; num_layers: all decoder layers.
    top_k: experts that a layer chooses, the largest number where layers differ; layer_top_k is then that of each.
    route_selftest: passed, skipped, or off where no routes are recorded (one that fails ends the start).
    max_request_tokens: prompt and output together that the cache can ever hold (at most context_length).
    """

    model_path: str
    architecture: str
    model_type: str
    dtype: str
    device: str
    vocab_size: int
    context_length: int
    max_total_tokens: int
    max_request_tokens: int
    recording: bool
    num_layers: int
    layer_ids: tuple[int, ...]
    num_experts: int
    top_k: int
    eos_token_ids: tuple[int, ...]
    route_selftest: str = "off"
    layer_top_k: tuple[int, ...] | None = None


Consumer = Callable[[list[RequestOutput]], None]
PAUSE_MODES = ("abort", "retract", "in_place")


def pause_mode(given: str) -> str:
    """The mode, checked. Raises UserError."""
    if given not in PAUSE_MODES:
        raise UserError(f"mode must be one of {', '.join(PAUSE_MODES)}, got {given!r}")
    return given


def failed(rid: str, message: str, status: int = 500, prompt_tokens: int = 0) -> RequestOutput:
    """The final output of a request that the engine can not serve (any more)."""
    reason = FinishReason("abort", message=message, status=status)
    return RequestOutput(rid, [], prompt_tokens, 0, reason, error=message)


class EngineClient(Protocol):
    """A running engine. All methods are thread-safe and return at once.

    `listen` registers the one consumer of outputs; it is called from the engine's thread with the news of a step.
    Every submitted request gets exactly one RequestOutput with `finish` set, whatever happens.
    """

    info: EngineInfo

    def listen(self, consumer: Consumer) -> None: ...

    def submit(self, requests: list[EngineRequest]) -> None: ...

    def abort(self, rid: str) -> None:
        """End the request with finish type abort and what it has so far. Unknown rid: nothing."""

    def finish(self, rid: str, keep: int, reason: FinishReason) -> None:
        """End the request after its first `keep` output tokens (a stop string was seen in the text)."""

    def control(self, name: str, /, **arguments: Any) -> Future[Any]:
        """Run one control operation between steps: flush_cache, pause, resume, loads, update_weights_from_disk,
        get_weights_by_name, update_weight_version, check_weights, release_memory, resume_memory, start_profile,
        stop_profile, freeze_gc. Errors come through the future."""

    def alive(self) -> bool: ...

    def shutdown(self) -> None: ...
