"""Formatting of graph table values, for the graph page and `encore graphs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def site_name(row: Mapping[str, Any]) -> str:
    """Return a row's site with its variant: the values, besides the bucket, that its graph was captured for."""
    variant = ", ".join(f"{name}={value}" for name, value in (row.get("statics") or {}).items())
    return f"{row['site']} ({variant})" if variant else str(row["site"])


def human_bytes(count: int) -> str:
    """Format a byte count with a binary unit, such as 1.5 MiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def percent(part: float, whole: float) -> str:
    """Format part / whole in percent with one decimal, or a dash if `whole` is zero."""
    return f"{100 * part / whole:.1f}%" if whole else "–"
