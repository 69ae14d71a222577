"""Typed access to a GGUF file's `{architecture}.*` metadata, and the refusal of keys that nobody reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.errors import ModelError

_LIMIT = 2**31
# Without an effect on a dense decoder's numbers.
_WITHOUT_EFFECT = frozenset({"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "expert_used_count"})
# Values without an effect; of other keys these are 0, false and nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.output_scale": (0, 1),
    "embedding_scale": (0, 1),
    "expert_weights_scale": (0, 1),
    "logit_scale": (0, 1),
    "pooling_type": (0, 1, 3),  # of vectors: pooling_config.py reads it
    "residual_scale": (0, 1),
}


class ArchitectureKeys:
    """The metadata of one architecture. Keys are named without their prefix; errors name the file and the whole key.

    It remembers which keys were read, so that `refuse_unread` finds settings that the model would ignore.
    """

    def __init__(self, metadata: Mapping[str, Any], architecture: str, path: str):
        self._metadata, self._prefix, self._path = metadata, f"{architecture}.", path
        self._read = set(_WITHOUT_EFFECT)

    def error(self, key: str, needed: str) -> ModelError:
        """Return a ModelError for `key`, for the caller to raise."""
        found = _shown(self._metadata.get(self._prefix + key))
        return ModelError(f"{self._path}: {self._prefix}{key} is {found}; it must be {needed}")

    def has(self, key: str) -> bool:
        """Return whether the file has `key`."""
        return self._prefix + key in self._metadata

    def whole(self, key: str, default: int | None = None) -> int:
        """Return a positive whole number."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _LIMIT:
            raise self.error(key, "a positive int")
        return value

    def number(self, key: str, default: float | None = None, low: float | None = None) -> float:
        """Return a number of at least `low`; None: above 0."""
        value = self._value(key, default)
        accepted = not isinstance(value, bool) and isinstance(value, int | float)
        if not accepted or not (0 < value < _LIMIT if low is None else low <= value < _LIMIT):
            raise self.error(key, "a positive float" if low is None else f"a number of at least {low:g}")
        return _decimal(value)

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number of at least 0."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LIMIT:
            raise self.error(key, "an int of at least 0")
        return value

    def factor(self, key: str) -> float | None:
        """Return a number above 0, None if it is absent or 0."""
        return self.number(key, 0.0, low=0.0) or None

    def flag(self, key: str, default: bool) -> bool:
        """Return a truth value."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "a bool")
        return value

    def layers(self, key: str, count: int, every: int) -> list[bool]:
        """Return a truth value per layer: a list, or all but every n-th, with n from the file or `every`."""
        value = self._value(key, every)
        if isinstance(value, list) and len(value) == count and all(isinstance(one, bool) for one in value):
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LIMIT:
            raise self.error(key, f"an int, or a list of {count} bools")
        return [value == 0 or (index + 1) % value != 0 for index in range(count)]

    def text(self, key: str, default: str, allowed: tuple[str, ...]) -> str:
        """Return one of the allowed texts."""
        value = self._value(key, default)
        if value not in allowed:
            raise self.error(key, f"one of {', '.join(allowed)}")
        return str(value)

    def refuse_unread(self, neutral: dict[str, tuple[Any, ...]]) -> None:
        """Raise ModelError for the first key that was not read and has an effect.

        `neutral` has values of further keys without one.
        """
        neutral = _NEUTRAL | neutral
        for name, value in self._metadata.items():
            key = name.removeprefix(self._prefix)
            if not name.startswith(self._prefix) or key in self._read:
                continue
            values = value if isinstance(value, list) else [value]
            if not all(any(_same(one, other) for other in neutral.get(key, (0, False, ""))) for one in values):
                raise ModelError(
                    f"{self._path}: {name} is {_shown(value)}, which is not supported from GGUF files; use the model's "
                    "Hugging Face folder"
                )

    def _value(self, key: str, default: Any) -> Any:
        self._read.add(key)
        value = self._metadata.get(self._prefix + key, default)
        if value is None:
            raise ModelError(f"{self._path}: metadata has no {self._prefix + key!r}")
        return value


def _decimal(value: float) -> float:
    """Return a number that was stored in single precision: the shortest decimal restores the original (1e-05)."""
    return float(str(np.float32(value)))


def _shown(value: Any) -> str:
    return "a list" if isinstance(value, list) else repr(_decimal(value) if isinstance(value, float) else value)


def _same(value: Any, wanted: Any) -> bool:
    if type(value) in (int, float) and type(wanted) in (int, float):
        return math.isclose(value, wanted, rel_tol=1e-6)  # stored in single precision
    return type(value) is type(wanted) and value == wanted
