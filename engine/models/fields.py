"""Typed access to the JSON object of a config.json, and the bounds of its values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import ModelError
from graph_cache.utils.validation import is_whole_number

MAX_LAYERS = 1024
MAX_SIZE = 2**24
MAX_CONTEXT = 2**22
MAX_NUMBER = 1e30


class Fields:
    """Typed access to a JSON object. Errors name the file, the key, the value found and what is expected."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values, self.where = values, where

    def error(self, key: str, needed: str) -> ModelError:
        """Return a ModelError for `key`, for the caller to raise."""
        found = f"{self.values[key]!r}" if key in self.values else "nothing"
        return ModelError(f"{self.where}: {key!r} must be {needed}, found {found}; correct it or use another model")

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = MAX_SIZE) -> int:
        """Return a whole number in [low, high]; null counts as absent."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not is_whole_number(value, low, high):
            raise self.error(key, f"a whole number from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number above 0 and up to MAX_NUMBER; null counts as absent."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_NUMBER:
            raise self.error(key, "a number above 0")
        return float(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Return a list of `count` numbers above 0 and up to MAX_NUMBER."""
        value = self.values.get(key)
        if not isinstance(value, list) or len(value) != count:
            raise self.error(key, f"a list of {count} numbers above 0")
        items = Fields({str(index): item for index, item in enumerate(value)}, f"{self.where}, {key}")
        return tuple(items.number(name) for name in items.values)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a boolean; null counts as absent."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return the token ids of a single id, a list of ids, or null."""
        value = self.values.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(is_whole_number(item, 0) for item in ids):
            raise self.error(key, "a token id or a list of token ids")
        return tuple(ids)
