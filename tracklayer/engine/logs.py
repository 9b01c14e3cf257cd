"""How a process of the server writes its log: lines of text, or one JSON object a line."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from datetime import UTC, datetime

FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True)
class LogStyle:
    """level: a name that logging knows; form: one of FORMATS."""

    level: str = "info"
    form: str = "text"

    def set_up(self) -> None:
        """Make the root logger write so, on stderr."""
        handler = logging.StreamHandler()
        text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
        handler.setFormatter(JsonLines() if self.form == "json" else text)
        logging.basicConfig(level=self.level.upper(), handlers=[handler])


class JsonLines(logging.Formatter):
    """time, level, logger, message, what `extra={"fields": {...}}` adds (a request's id is `rid`), and exceptions."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
        }
        fields = getattr(record, "fields", None)
        entry |= fields if fields is not None else {"message": record.getMessage()}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)
