"""Paths of fields in error messages, as the caller sent them."""

from __future__ import annotations

from collections.abc import Sequence

_SCALARS = frozenset(("str", "int", "float", "bool", "bytes"))  # tried types of a union

# Fields whose value is one object with fields.
OBJECTS = frozenset(("stream_options", "options", "init_info", "update_info"))


def field_path(loc: Sequence[int | str]) -> str:
    """Return the path of pydantic's error location as the caller sent it, such as "messages[0].role".

    A union adds the tried type to the location ("stop", "list[str]", 0): the path ends before it.
    """
    path, earlier = str(loc[0]), loc[0]
    for part in loc[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not (isinstance(earlier, int) or earlier in OBJECTS):
            break
        elif part.isidentifier() and part.islower() and part not in _SCALARS:
            path += f".{part}"
        else:
            break
        earlier = part
    return path
