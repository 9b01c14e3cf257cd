"""Architecture name -> family. A new family is one file in families/, found by itself."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Any

from tracklayer.errors import CheckpointError
from tracklayer.models import families
from tracklayer.models.spec import Family, ModelSpec


@cache
def all_families() -> tuple[Family, ...]:
    """Every family, by name: each module of families/ has a FAMILY or a tuple FAMILIES."""
    found: list[Family] = []
    for module_info in pkgutil.iter_modules(families.__path__):
        module = importlib.import_module(f"{families.__name__}.{module_info.name}")
        found.extend(module.FAMILIES if hasattr(module, "FAMILIES") else (module.FAMILY,))
    return tuple(sorted(found, key=lambda family: family.name))


def resolve(config: dict[str, Any]) -> tuple[Family, ModelSpec]:
    """The family and the ModelSpec of a checkpoint's config.json.

    Raises CheckpointError for an architecture that is not known (the message lists those that are), and for a config
    that lacks a value or holds an impossible one.
    """
    names = config.get("architectures") or ["(none)"]
    if not isinstance(names, list):
        raise CheckpointError(f"architectures in config.json must be a list, got {names!r}")
    for family in all_families():
        if names[0] in family.architectures and family.claims(config):
            try:
                return family, family.spec(config)
            except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
                kind = type(error).__name__
                raise CheckpointError(f"this config.json makes no {family.name} model: {kind}: {error}") from error
    for family in all_families():
        if names[0] in family.architectures:
            raise CheckpointError(
                f"{names[0]!r} is served as {family.name} only, and this config is not of that kind"
                + (f": {family.note}" if family.note else "")
            )
    known = ", ".join(name for family in all_families() for name in family.architectures)
    raise CheckpointError(f"architecture {names[0]!r} is not known; known are: {known}")
