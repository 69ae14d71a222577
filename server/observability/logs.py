"""Log formats: one record per line, as text or as JSON.

Headers, query strings, prompts and completions are never logged, so that no key or user text can leak.
"""

from __future__ import annotations

import json
import logging
import logging.config
import time
from collections.abc import Mapping
from typing import Any

from engine.utils.stderr_handler import StderrHandler, log_uncaught

FIELDS = "encore"  # attribute of a log record that holds its extra fields


class JsonFormatter(logging.Formatter):
    """Format a record as one JSON object: time (UTC, ISO 8601), level, logger, message, and extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
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
    """Format a record as one line of text: time, level, logger, message, and extra fields as name=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line without its exception. Empty fields are left out."""
        fields = {name: value for name, value in getattr(record, FIELDS, {}).items() if value not in (None, {}, [])}
        return " ".join([super().formatMessage(record), *(f"{name}={_plain(value)}" for name, value in fields.items())])


def set_up_logging(level: str, log_format: str) -> None:
    """Log to standard error, also warnings and uncaught exceptions. Logging never waits for the reader."""
    logging.config.dictConfig(log_settings(level, log_format))
    log_uncaught()


def flush_log() -> None:
    """Write the lines that wait, as far as standard error takes them."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def log_settings(level: str, log_format: str = "text") -> dict[str, object]:
    """Return settings for logging.config.dictConfig: one line per record, on standard error."""
    ours = {"level": level.upper()}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": JsonFormatter if log_format == "json" else TextFormatter}},
        "handlers": {"stderr": {"()": StderrHandler, "formatter": "line"}},
        "root": {"level": "WARNING", "handlers": ["stderr"]},
        "loggers": dict.fromkeys(("encore", "engine", "graph_cache"), ours),
    }


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{name}:{count}" for name, count in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)
