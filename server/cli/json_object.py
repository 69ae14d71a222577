"""Parse the JSON objects that commands read."""

from __future__ import annotations

import json
from typing import Any

from engine.errors import ConfigError, EngineError


def json_object(text: str | bytes, source: str, error: type[EngineError] = ConfigError) -> dict[str, Any]:
    """Return the JSON object in `text`. Raises `error`, naming `source`, if it is none."""
    try:
        found = json.loads(text)
    except ValueError as exc:
        raise error(f"{source} is not valid JSON: {exc}") from exc
    if not isinstance(found, dict):
        raise error(f"{source} is not a JSON object")
    return found
