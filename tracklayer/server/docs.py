"""The OpenAPI document's request bodies: endpoints read raw bodies (limits, own error shapes) and declare them here."""

from __future__ import annotations

from typing import Any

from tracklayer.server.protocol import Body


def body_of(kind: type[Body], *, required: bool = True) -> dict[str, Any]:
    """`openapi_extra` of an endpoint that reads `kind`."""
    schema = kind.model_json_schema(ref_template="#/$defs/{model}")
    schema = _inline(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


def _inline(schema: Any, parts: dict[str, Any]) -> Any:
    """The schema with its references replaced by what they name, so that it stands alone."""
    if isinstance(schema, dict):
        name = schema.get("$ref", "").removeprefix("#/$defs/")
        if name in parts:
            return _inline(parts[name], parts)
        return {key: _inline(value, parts) for key, value in schema.items()}
    if isinstance(schema, list):
        return [_inline(value, parts) for value in schema]
    return schema
