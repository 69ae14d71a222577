"""Give child processes the log format of their parent."""

from __future__ import annotations

import logging
import pickle

from engine.utils.stderr_handler import StderrHandler, log_uncaught

logger = logging.getLogger(__name__)


def log_format() -> tuple[bytes, int]:
    """Return the pickled formatter and the level of this process's log, for a child that logs to the same stream.

    The formatter is pickled by itself because a child may not be able to import its class.
    """
    kinds = (logging.StreamHandler, StderrHandler)
    plain = (handler for handler in logging.getLogger().handlers if type(handler) in kinds)
    formatter, level = next((handler.formatter for handler in plain), None), logging.getLogger("engine")
    try:
        return pickle.dumps(formatter), level.getEffectiveLevel()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        logger.debug("child processes log in the default format: %s", error)
        return pickle.dumps(None), level.getEffectiveLevel()


def set_up_child_log(pickled_formatter: bytes, level: int, prefix: str = "") -> None:
    """Log to standard error in the parent's format, with `prefix` before every message.

    Warnings and uncaught exceptions are logged too.
    """
    try:
        formatter = pickle.loads(pickled_formatter)
    except (AttributeError, ImportError):  # the formatter's class exists only in the parent's program
        formatter = None
    handler = StderrHandler()
    handler.setFormatter(formatter or logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def add_prefix(record: logging.LogRecord) -> bool:
        record.msg = f"{prefix}{record.msg}"
        return True

    if prefix:
        handler.addFilter(add_prefix)
    logging.basicConfig(handlers=[handler])
    log_uncaught()
    for name in ("engine", "graph_cache"):
        logging.getLogger(name).setLevel(level)
