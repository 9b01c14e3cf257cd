"""What a caller may put into a GenerateCall's fields: plain values of the right type, or a UserError that names them.

Token ids may come as lists, tuples, arrays or tensors; they leave as lists of int.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from tracklayer.engine.sampling import is_bool, is_int, is_text, short
from tracklayer.errors import UserError

INT64 = range(-(1 << 63), 1 << 63)


def _texts(value: Any) -> bool:
    return is_text(value) or (isinstance(value, list) and all(map(is_text, value)))


def _keys(value: Any) -> bool:
    return value is None or is_text(value) or (isinstance(value, list) and all(v is None or is_text(v) for v in value))


Test = Callable[[Any], bool]
KINDS: dict[str, tuple[Test, str]] = {
    "text": (lambda v: v is None or _texts(v), "text or a list of texts"),
    "rid": (lambda v: v is None or _texts(v), "a string or a list of strings"),
    **dict.fromkeys(("extra_key", "cache_salt"), (_keys, "a string or a list of strings")),
    **dict.fromkeys(("return_text_in_logprobs", "return_prompt_token_ids", "stream"), (is_bool, "true or false")),
    **dict.fromkeys(("return_routed_experts", "include_last"), (is_bool, "true or false")),
    "routed_experts_start_len": (is_int, "an integer"),
    "priority": (lambda v: v is None or (is_int(v) and v in INT64), "an integer of at most 64 bits"),
}


def check_fields(call: Any) -> None:
    """Raise UserError for the first field of a GenerateCall that is not of its kind."""
    for name, (test, words) in KINDS.items():
        value = getattr(call, name)
        if not test(value):
            raise UserError(f"{name} must be {words}, got {short(value)}")


def plain_ids(given: Any) -> Any:
    """input_ids as a list of int, or a list of such lists; None stays. Raises UserError for anything else."""
    if given is None:
        return None
    given = _as_list(given)
    if given and isinstance(_as_list(given[0]), list):
        return [_ids(_as_list(one)) for one in given]
    return _ids(given)


def _as_list(value: Any) -> Any:
    if isinstance(value, tuple) or (hasattr(value, "tolist") and getattr(value, "ndim", 0)):
        return list(value) if isinstance(value, tuple) else value.tolist()
    return value


def _ids(ids: Any) -> list[int]:
    if not isinstance(ids, list):
        raise UserError(f"input_ids must be a list of token ids or a list of such lists, got {short(ids)}")
    if set(map(type, ids)) <= {int}:  # at the speed of C: prompts are long
        return ids
    plain = []
    for token in ids:
        try:
            if isinstance(token, bool):
                raise TypeError
            plain.append(operator.index(token))
        except TypeError:
            raise UserError(f"input_ids must hold integers, got {short(token)}") from None
    return plain
