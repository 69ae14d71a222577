"""The graph table of GET /graphs as text, for the graph page and `encore graphs`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Summary:
    """What a set of rows adds up to. `computed` and `padded` count the batch rows of all replays."""

    captured: int
    total: int
    used: int
    failed: int
    replays: int
    padded: int
    computed: int

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Summary:
        return cls(
            captured=sum(row["state"] == "captured" for row in rows),
            total=len(rows),
            used=sum(bool(row["replays"]) for row in rows),
            failed=sum(bool(row.get("failure")) for row in rows),
            replays=sum(row["replays"] for row in rows),
            padded=sum(row["padded_rows"] for row in rows),
            computed=sum(computed_rows(row) for row in rows),
        )

    @property
    def padding(self) -> str:
        return percent(self.padded, self.computed)


@dataclass(frozen=True)
class Group:
    """The rows of one captured callable. `shown` have replays or a failure, `unused` have neither."""

    site: str
    scope: str
    phase: str
    engine: str
    summary: Summary
    shown: list[Row]
    unused: list[Row]


def groups(rows: Iterable[Row]) -> list[Group]:
    """Group rows by site, scope, phase and engine, in the order of their first rows."""
    parts: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        key = (str(row["site"]), str(row["scope"]), str(row["phase"]), str(row.get("engine", "")))
        parts.setdefault(key, []).append(row)
    return [
        Group(
            site, scope, phase, engine, Summary.of(part),
            shown=[row for row in part if is_notable(row)],
            unused=[row for row in part if not is_notable(row)],
        )
        for (site, scope, phase, engine), part in parts.items()
    ]  # fmt: skip


def is_notable(row: Row) -> bool:
    """Whether a graph was replayed or failed to be captured."""
    return bool(row["replays"] or row.get("failure"))


def computed_rows(row: Row) -> int:
    """Return the number of batch rows that a graph's replays computed, including padding."""
    return int(row["replays"]) * int(row["bucket"])


def variant(row: Row) -> str:
    """Return the values, besides the bucket, that a row's graph was captured for."""
    return ", ".join(f"{name}={value}" for name, value in (row.get("statics") or {}).items())


def site_name(row: Row) -> str:
    """Return a row's site with its variant."""
    return f"{row['site']} ({variant(row)})" if row.get("statics") else str(row["site"])


def warm_text(warm: Mapping[str, Any]) -> str:
    """Return the warm-up mode, and how many graphs it has yet to capture; "" for an unknown mode."""
    if "mode" not in warm:
        return ""
    is_ahead = warm.get("pending") and warm["mode"] != "lazy"  # lazy: on first use
    return f"warm-up: {warm['mode']}" + (f", {warm['pending']:,} to go" if is_ahead else "")


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
