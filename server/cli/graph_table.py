"""The output of `encore graphs`: a summary, then a table per site without the unused graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from server.formatting import Group, Summary, computed_rows, groups, human_bytes, percent, variant, warm_text

HEADERS = ("captured for", "bucket", "state", "replays", "padding", "bytes", "capture", "digest")
RIGHT = {"bucket", "replays", "padding", "bytes", "capture"}
# The colours of the pages, as the terminal's palette has them.
COLOURS = {"captured": 32, "failed": 31, "replays": 36, "padding": 33}


def graph_table(body: Mapping[str, Any], show_all: bool = False, coloured: bool = False) -> str:
    """Format the JSON of GET /graphs as text. `show_all` lists unused graphs too."""
    paint = _painted if coloured else _plain
    parts = [_summary(body, paint), *(_section(group, show_all, paint) for group in groups(body["graphs"]))]
    return "\n\n".join(parts)


def _summary(body: Mapping[str, Any], paint: Any) -> str:
    total, warm = Summary.of(body["graphs"]), body.get("warm", {})
    captured = ", ".join(filter(None, (f"{total.captured:,} of {total.total:,} graphs", warm_text(warm))))
    lines = {
        "model": body["model"],
        "captured": paint(captured, "captured"),
        "replays": paint(f"{total.replays:,} of {total.used:,} graphs", "replays"),
        "padding": paint(f"{total.padding} ({total.padded:,} of {total.computed:,} rows)", "padding"),
        "memory pool": human_bytes(body["pool_bytes"]),
    }
    if total.failed:
        lines["failed"] = paint(f"{total.failed:,} graphs", "failed")
    if not total.total:
        lines = {"model": body["model"], "graphs": "none: the engine runs eager"}
    width = max(map(len, lines))
    return "\n".join(f"{name:{width}}  {value}" for name, value in lines.items())


def _section(group: Group, show_all: bool, paint: Any) -> str:
    summary = group.summary
    head = f"{group.site}: scope {group.scope}, phase {group.phase}"
    head += f", {group.engine}" if group.engine else ""
    lines = [f"{head}; {summary.captured:,} of {summary.total:,} captured"]
    rows = [*group.shown, *(group.unused if show_all else ())]
    if rows:
        lines += _table(rows, paint)
    if group.unused and not show_all:
        lines.append(f"  {len(group.unused):,} unused: --all lists them")
    return "\n".join(lines)


def _table(rows: Sequence[Mapping[str, Any]], paint: Any) -> list[str]:
    cells = [_cells(row) for row in rows]
    used = [name for name in HEADERS if name != "captured for" or any(cell[name] for cell in cells)]
    widths = {name: max(len(name), *(len(cell[name]) for cell in cells)) for name in used}

    def line(cell: Mapping[str, str], row: Mapping[str, Any] | None) -> str:
        texts = [
            _aligned(cell[name], widths[name], name) if row is None
            else paint(_aligned(cell[name], widths[name], name), _meaning(row, name))
            for name in used
        ]  # fmt: skip
        return "  " + "  ".join(texts).rstrip()

    lines = [line({name: name for name in used}, None)]
    for row, cell in zip(rows, cells, strict=True):
        lines.append(line(cell, row))
        if row.get("failure"):
            lines.append("    " + paint(str(row["failure"]), "failed"))
    return lines


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    values = (
        variant(row), f"{row['bucket']:,}", str(row["state"]).replace("_", " "), f"{row['replays']:,}",
        percent(row["padded_rows"], computed_rows(row)), human_bytes(row["bytes"]), f"{row['capture_seconds']:.3f} s",
        str(row.get("digest", "")),
    )  # fmt: skip
    return dict(zip(HEADERS, values, strict=True))


def _meaning(row: Mapping[str, Any], name: str) -> str:
    if name == "state":
        return "captured" if row["state"] == "captured" else "failed" if row.get("failure") else ""
    if name == "padding":
        return "padding" if row["padded_rows"] else ""
    return "replays" if name == "replays" and row["replays"] else ""


def _aligned(text: str, width: int, name: str) -> str:
    return text.rjust(width) if name in RIGHT else text.ljust(width)


def _painted(text: str, meaning: str) -> str:
    return f"\x1b[{COLOURS[meaning]}m{text}\x1b[0m" if meaning else text


def _plain(text: str, meaning: str) -> str:
    return text
