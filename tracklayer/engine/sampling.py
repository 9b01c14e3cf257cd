"""sampling_params as JSON gives them, checked by name and type, as a SamplingParams."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tracklayer.errors import UserError
from tracklayer.types import SamplingParams


class SamplingFieldError(UserError):
    """An unknown key or a wrong JSON type inside sampling_params (the wire has a body of its own for it)."""


def parse_sampling(raw: Any, defaults: dict[str, Any] | None = None) -> SamplingParams:
    """SamplingParams from a JSON object (null: default; but max_new_tokens null: to the end of the context).

    Raises SamplingFieldError for unknown keys and wrong types, UserError for values out of range.
    """
    if isinstance(raw, SamplingParams):
        return raw
    if raw is not None and not isinstance(raw, dict):
        raise SamplingFieldError(f"sampling_params must be an object, got {type(raw).__name__}")
    raw = {**(defaults or {}), **(raw or {})}
    for key in ("beam_width", "choice", "watermark"):
        if raw.pop(key, None) is not None:
            raise UserError(f"sampling_params.{key} is not supported; leave it out")
    if raw.get("top_k") == 0 and not isinstance(raw["top_k"], bool):
        raise UserError("top_k must be -1 (all) or at least 1, got 0")
    for key, value in raw.items():
        if key in _KINDS and value is not None and not _KINDS[key](value):
            raise SamplingFieldError(f"sampling_params.{key} has the wrong type: {short(value)}")
    raw.pop("custom_params", None)  # read by custom logit processors alone, which are refused: any JSON may be in it
    to_the_end = "max_new_tokens" in raw and raw["max_new_tokens"] is None
    unknown = set(raw) - set(SamplingParams.__dataclass_fields__)
    if unknown:
        known = ", ".join(f"`{k}`" for k in SamplingParams.__dataclass_fields__)
        raise SamplingFieldError(f"unknown field `{min(unknown)}`, expected one of {known}")
    params = SamplingParams.from_dict(raw)
    return replace(params, max_new_tokens=None) if to_the_end else params


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_int(v: Any) -> bool:
    return isinstance(v, int) and not isinstance(v, bool)


def _is_number(v: Any) -> bool:
    return isinstance(v, (int, float)) and not isinstance(v, bool)


def is_bool(v: Any) -> bool:
    return isinstance(v, bool)


def is_text(v: Any) -> bool:
    return isinstance(v, str)


def _is_texts(v: Any) -> bool:
    return is_text(v) or (isinstance(v, (list, tuple)) and all(map(is_text, v)))


def _is_ids(v: Any) -> bool:
    return is_int(v) or (isinstance(v, (list, tuple)) and all(map(is_int, v)))


def _is_bias(v: Any) -> bool:
    return isinstance(v, dict) and all(_whole(k) and _is_number(x) for k, x in v.items())


def _whole(key: Any) -> bool:
    return is_int(key) or (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 12)


_KINDS = {
    **dict.fromkeys(("max_new_tokens", "min_new_tokens", "top_k", "n", "sampling_seed", "stream_interval"), is_int),
    **dict.fromkeys(("temperature", "top_p", "min_p"), _is_number),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty"), _is_number),
    **dict.fromkeys(("ignore_eos", "no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens"), is_bool),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"), is_text),
    **dict.fromkeys(("stop", "stop_regex"), _is_texts),
    "stop_token_ids": _is_ids,
    "logit_bias": _is_bias,
    "custom_params": lambda v: isinstance(v, dict),
}
