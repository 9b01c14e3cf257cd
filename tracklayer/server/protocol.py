"""Request bodies: names, types and defaults. Types are strict (no "1" for 1); values are checked by the front end."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Ids = list[int]
Steps = Annotated[int | None, Field(ge=1, lt=1 << 63, strict=False)]


class Body(BaseModel):
    """Unknown keys are kept aside (`model_extra`), null means the default."""

    model_config = ConfigDict(strict=True, extra="allow")


class GenerateBody(Body):
    """POST /generate, SGLang's native interface."""

    text: str | list[str] | None = None
    input_ids: Ids | list[Ids] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any] | None] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int | list[int] | None] | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    stream: bool | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: int | None = None
    routed_experts_format: str | None = Field(None, description="int32 (SGLang's), packed, or npy")
    priority: int | None = None
    extra_key: str | list[str] | None = None
    cache_salt: str | list[str] | None = None
    lora_path: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    input_embeds: Any = None
    session_id: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIBody(Body):
    """What /v1/completions and /v1/chat/completions share, OpenAI's fields and the extra ones alike."""

    model: str = "default"
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | None = None
    rid: str | list[str] | None = None
    priority: int | None = None
    extra_key: str | list[str] | None = None
    cache_salt: str | list[str] | None = None
    lora_path: Any = None
    session_id: Any = None
    custom_params: dict[str, Any] | None = None
    routed_dp_rank: int | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: int | None = None
    routed_experts_format: str | None = None
    return_token_ids: bool | None = None


class CompletionBody(OpenAIBody):
    """POST /v1/completions."""

    prompt: str | Ids | list[str] | list[Ids] = ""
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    user: str | None = None


class ChatBody(OpenAIBody):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = []
    input_ids: Ids | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    return_meta_info: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_input_ids_in_sglext: bool | None = None
    return_output_ids_in_sglext: bool | None = None


class TokenizeBody(Body):
    """POST /tokenize: `prompt`, one string or several, or chat `messages`."""

    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: Ids | list[Ids]
    skip_special_tokens: bool | None = None


class InferenceBody(Body):
    """POST /inference/v1/generate, vLLM's token-in, token-out interface."""

    token_ids: Ids
    sampling_params: dict[str, Any] | None = None
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    features: Any = None


class AbortBody(Body):
    rid: str | None = None
    abort_all: bool | None = None


class PauseBody(Body):
    mode: str | None = None


class DiskUpdateBody(Body):
    model_path: str
    load_format: str | None = None
    abort_all_requests: bool | None = None
    weight_version: str | None = None
    flush_cache: bool | None = None


class WeightNameBody(Body):
    name: str
    truncate_size: int | None = Field(None, ge=0)


class WeightVersionBody(Body):
    new_version: str
    abort_all_requests: bool | None = None


class MemoryBody(Body):
    tags: list[str] | None = Field(None, description="kv_cache, weights, cuda_graph; none: all of them")


class WeightsCheckerBody(Body):
    """POST /weights_checker. skip_tensor_list: texts; tensors whose names hold one of them are left out."""

    action: str | None = Field(None, description="checksum, snapshot, reset_tensors or compare")
    skip_tensor_list: list[str] | None = None


class ProfileBody(Body):
    """POST /start_profile; numbers may be strings."""

    output_dir: str | None = None
    start_step: Steps = None
    num_steps: Steps = None
    activities: list[str] | None = Field(None, description="CPU, GPU, MEM")
    with_stack: bool | None = None
    record_shapes: bool | None = None


class EmptyBody(Body):
    """A body whose keys are all ignored."""
