"""What the server writes to its log: one record per event, as a line of text or of JSON, and one per request.

Owns the formats and the request record. Headers, queries, prompts and answers are never logged: a key or a user's text
can't leak from here. Knows requests by what their jobs counted.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass

FIELDS = "encore"  # the attribute of a log record that holds its further fields


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time (UTC, ISO 8601), level, logger, message, and the record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


class TextFormatter(logging.Formatter):
    """One line per record for people: time, level, logger, message, and the record's own fields as name=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without its exception; an empty field is left out."""
        fields = {name: value for name, value in getattr(record, FIELDS, {}).items() if value not in (None, {}, [])}
        return " ".join([super().formatMessage(record), *(f"{name}={_plain(value)}" for name, value in fields.items())])


def log_settings(level: str, log_format: str = "text") -> dict[str, object]:
    """Settings for logging.config: one line per record, on standard error."""
    ours = {"level": level.upper()}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": JsonFormatter if log_format == "json" else TextFormatter}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "root": {"level": "WARNING", "handlers": ["stderr"]},
        "loggers": dict.fromkeys(("encore", "engine", "graph_cache"), ours),
    }


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{name}:{count}" for name, count in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)
