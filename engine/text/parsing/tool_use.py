"""How a request may use tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """The functions that an output may call, and how.

    Attributes:
        functions: Function name -> JSON schema of its parameters.
        places: Function name -> the field of the caller's request that holds the schema.
        strict: Names of the functions whose calls must follow their schema.
        required: The output must be calls; otherwise it may be text, calls, or both.
        max_calls: Maximum number of calls; None: any.
    """

    functions: Mapping[str, Mapping[str, Any]]
    places: Mapping[str, str] = field(default_factory=dict)
    strict: frozenset[str] = frozenset()
    required: bool = False
    max_calls: int | None = None
