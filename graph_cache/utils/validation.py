"""Validation helpers and suggestions shared by all packages. Pure Python."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, Self, TypeGuard, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def did_you_mean(word: object, known: Iterable[str], spell: Callable[[str], str] = str) -> str:
    """Return `; did you mean 'nearest'?` for the known name nearest to `word`, or an empty string.

    `spell` gives the suggestion's spelling. Compares the first 64 characters only, so that a long word from a request
    costs little.
    """
    near = difflib.get_close_matches(word[:64], list(known), n=1, cutoff=0.5) if isinstance(word, str) else []
    return f"; did you mean {spell(near[0])!r}?" if near else ""


def is_whole_number(value: object, low: int | None = None, high: int | None = None) -> TypeGuard[int]:
    """Return whether `value` is an int in [low, high]. A bool is not a whole number; None leaves a side unbounded."""
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return (low is None or value >= low) and (high is None or value <= high)


class NamesFields:
    """A base of dataclasses whose TypeError for an unknown keyword names the nearest field."""

    def __new__(cls, *args: Any, **values: Any) -> Self:
        known = _keywords(cls)  # type: ignore[arg-type]  # a class is hashable
        if not values.keys() <= known:
            unknown = next(name for name in values if name not in known)
            raise TypeError(f"{cls.__name__} has no field {unknown!r}{did_you_mean(unknown, known)}")
        return super().__new__(cls)


@functools.cache
def _keywords(cls: type) -> frozenset[str]:
    return frozenset(inspect.signature(cls).parameters)


def names_arguments(function: Callable[P, R], fields_of: Mapping[str, type] | None = None) -> Callable[P, R]:
    """Decorate a public method, so that its TypeError for an unknown keyword names the nearest argument.

    `fields_of` maps arguments to dataclasses: for a keyword that is a field of one, the error names that argument.
    """
    homes = {field.name: name for name, kind in (fields_of or {}).items() for field in dataclasses.fields(kind)}
    known = frozenset(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if not kwargs.keys() <= known:
            unknown = next(name for name in kwargs if name not in known)
            home = homes.get(unknown)
            hint = f"; give {home}={{{unknown!r}: …}}" if home else did_you_mean(unknown, known)
            raise TypeError(f"{function.__qualname__}() has no argument {unknown!r}{hint}")
        return function(*args, **kwargs)

    return checked
