"""The graph table page of GET /graphs, which refreshes itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from server.formatting import human_bytes, percent, site_name
from server.pages.page import Page

_PAGE = Page("graphs")
HEADERS = _PAGE.headers


def render_graphs_page(body: Mapping[str, Any]) -> str:
    """Return the HTML document for the JSON body of GET /graphs."""
    rows = body["graphs"]
    return _PAGE.render(
        model=body["model"],
        facts=_facts(rows, body.get("warm", {}), body["pool_bytes"]),
        rows=[_shown(row) for row in rows],
    )


def _facts(rows: Sequence[Mapping[str, Any]], warm: Mapping[str, Any], pool_bytes: int) -> dict[str, str]:
    """Return the summary values above the table: name -> text."""
    captured = sum(row["state"] == "captured" for row in rows)
    facts = {
        "Captured": f"{captured} of {len(rows)}",
        "Replays": f"{sum(row['replays'] for row in rows):,}",
        "Padding": percent(sum(row["padded_rows"] for row in rows), sum(_computed(row) for row in rows)),
        "Memory pool": human_bytes(pool_bytes),
    }
    if "mode" in warm:
        facts["Warm-up"] = str(warm["mode"])
    if "ratio" in warm:
        facts["Warm"] = percent(warm["ratio"], 1)
    return facts


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's cells as text, the CSS class of its state, and the width of its padding bar (0 to 100)."""
    computed = _computed(row)
    failure = row.get("failure")
    return {
        "site": site_name(row),
        "bucket": f"{row['bucket']:,}",
        "state": row["state"].replace("_", " "),
        "state_class": "captured" if row["state"] == "captured" else "failed" if failure else "",
        "failure": failure,
        "replays": f"{row['replays']:,}",
        "padding": percent(row["padded_rows"], computed),
        "padding_width": round(100 * row["padded_rows"] / computed) if computed else 0,
        "bytes": human_bytes(row["bytes"]),
        "capture": f"{row['capture_seconds']:.3f} s",
        "scope": row["scope"],
        "phase": row["phase"],
        "engine": row.get("engine", ""),
        "digest": row.get("digest", ""),
    }


def _computed(row: Mapping[str, Any]) -> int:
    """Return the number of rows that a graph's replays computed, including padding."""
    return row["replays"] * row["bucket"]
