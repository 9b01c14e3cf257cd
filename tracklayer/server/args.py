"""The command line of the server: flags are the fields of EngineConfig and ServerConfig, no more and no less.

SGLang's and vLLM's other names are understood; their flags that mean nothing here give one warning line each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tracklayer.config import EngineConfig
from tracklayer.engine.flags import LACKING, WITHOUT_EFFECT, foreign, plain_name, unknown_flag
from tracklayer.errors import UserError
from tracklayer.server.config import ServerConfig

FIELDS = {f.name: (owner, f) for owner in (EngineConfig, ServerConfig) for f in fields(owner)}
TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


@dataclass(slots=True)
class Launch:
    """A parsed command line."""

    engine: EngineConfig
    server: ServerConfig
    warnings: list[str] = field(default_factory=list)


def parse(argv: list[str]) -> Launch:
    """Flags to configurations. Raises UserError for an unknown flag (naming the nearest) or a bad value."""
    given: dict[str, Any] = {}
    warnings = []
    for name, words in _pairs(argv):
        if name == "config":
            given = {**_from_file(" ".join(words)), **given}
        elif name in FIELDS:
            given[name] = _value(name, words)
        elif name.startswith("no_") and name[3:] in FIELDS and _kind(name[3:]) == "bool" and not words:
            given[name[3:]] = False
        elif name in WITHOUT_EFFECT or name in LACKING:
            line = _foreign(name, " ".join(words) if words else True)
            warnings += [line] if line else []
        else:
            raise UserError(unknown_flag(name, FIELDS))
    if not given.get("model_path"):
        raise UserError("which model? Give its checkpoint directory: tracklayer serve DIR")
    parts: dict[type, dict[str, Any]] = {EngineConfig: {}, ServerConfig: {}}
    for name, value in given.items():
        parts[FIELDS[name][0]][name] = value
    return Launch(EngineConfig(**parts[EngineConfig]), ServerConfig(**parts[ServerConfig]), warnings)


def _foreign(name: str, value: Any) -> str | None:
    try:
        return foreign(name, value)
    except ValueError as error:
        raise UserError(str(error)) from None


def _pairs(argv: list[str]) -> Iterator[tuple[str, list[str]]]:
    """(plain name, value words) of each flag; a word in front of all flags is the model path."""
    i = 0
    if argv and not argv[0].startswith("-"):
        yield "model_path", [argv[0]]
        i = 1
    while i < len(argv):
        word = argv[i]
        i += 1
        if not word.startswith("--"):
            raise UserError(f"unexpected word {word!r}; flags begin with --")
        name, equals, value = word.partition("=")
        name = plain_name(name)
        words = [value] if equals else []
        while not equals and i < len(argv) and not argv[i].startswith("--"):
            if name in FIELDS and (words or (_kind(name) == "bool" and argv[i].lower() not in TRUE + FALSE)):
                break
            words.append(argv[i])
            i += 1
        yield name, words


def _kind(name: str) -> str:
    """bool, int, float or str, from the field's annotation."""
    return str(FIELDS[name][1].type).removesuffix(" | None")


def _value(name: str, words: list[str]) -> Any:
    flag, kind = "--" + name.replace("_", "-"), _kind(name)
    if kind == "bool":
        return not words or words[0].lower() in TRUE
    if len(words) != 1:
        raise UserError(f"{flag} needs a value")
    if kind == "str":
        return words[0]
    try:
        return int(words[0]) if kind == "int" else float(words[0])
    except ValueError:
        raise UserError(f"{flag} must be {'an integer' if kind == 'int' else 'a number'}, got {words[0]!r}") from None


def _from_file(path: str) -> dict[str, Any]:
    """Values of --config FILE, a YAML or JSON mapping of flag names; flags on the command line win."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"--config {path!r} is not a file")
    import yaml

    try:
        text = file.read_text()
        raw = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"--config {path!r} can not be read: {error}") from error
    if not isinstance(raw, dict):
        raise UserError(f"--config {path!r} must hold a mapping of flags to values")
    values = {}
    for key, value in raw.items():
        name = plain_name(str(key))
        if name in FIELDS:
            values[name] = value if isinstance(value, bool) or value is None else _value(name, [str(value)])
        elif name in WITHOUT_EFFECT or name in LACKING:
            _foreign(name, value)
        else:
            raise UserError(f"{path}: {unknown_flag(name, FIELDS)}")
    return values


def usage() -> str:
    """The text of --help: every flag with its default."""
    lines = ["usage: tracklayer serve MODEL [flags]", ""]
    for owner, title in ((EngineConfig, "engine"), (ServerConfig, "server")):
        lines.append(f"{title}:")
        for f in fields(owner):
            kind = _kind(f.name)
            value = "" if kind == "bool" else f" {kind.upper()}"
            default = "" if f.default in (None, False, "") else f" [{f.default}]"
            lines.append(f"  --{f.name.replace('_', '-')}{value}{default}\n        {f.metadata['help']}")
        lines.append("")
    lines.append("  --config FILE\n        YAML or JSON mapping of flags to values; flags given here win")
    return "\n".join(lines)
