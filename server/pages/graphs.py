"""The graph page of GET /graphs, which refreshes itself: a summary, then a table per site with unused graphs folded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.formatting import Group, Summary, computed_rows, groups, human_bytes, percent, variant, warm_text
from server.pages.page import Page

_PAGE = Page("graphs")
HEADERS = _PAGE.headers


def render_graphs_page(body: Mapping[str, Any]) -> str:
    """Return the HTML document for the JSON body of GET /graphs."""
    rows, warm = body["graphs"], body.get("warm", {})
    return _PAGE.render(
        model=body["model"],
        cards=_cards(Summary.of(rows), warm, body["pool_bytes"]),
        groups=[_shown_group(group) for group in groups(rows)],
    )


def _cards(total: Summary, warm: Mapping[str, Any], pool_bytes: int) -> list[dict[str, Any]]:
    """Return the summary above the tables: title, value, text under it, and the width of its bar or None."""
    return [
        {"title": "Graphs captured", "value": f"{total.captured:,}", "unit": f" of {total.total:,}",
         "under": warm_text(warm), "width": _share(total.captured, total.total)},
        {"title": "Replays", "value": f"{total.replays:,}", "unit": "", "width": None,
         "under": f"of {total.used:,} of these graphs"},
        {"title": "Padding in replays", "value": total.padding.removesuffix("%"),
         "unit": "%" if total.computed else "", "under": f"{total.padded:,} of {total.computed:,} rows",
         "width": _share(total.padded, total.computed), "waste": True},
        {"title": "Memory pool", "value": human_bytes(pool_bytes).split()[0],
         "unit": " " + human_bytes(pool_bytes).split()[1], "width": None, "under": "shared by all graphs"},
    ]  # fmt: skip


def _shown_group(group: Group) -> dict[str, Any]:
    summary = group.summary
    facts = [f"{summary.captured:,} of {summary.total:,} captured", f"{summary.replays:,} replays"]
    if summary.computed:
        facts.append(f"{summary.padding} padding")
    return {
        "site": group.site,
        "about": " · ".join(filter(None, (f"scope {group.scope}", f"phase {group.phase}", group.engine))),
        "facts": " · ".join(facts),
        "failed": summary.failed,
        "has_variants": any(map(variant, [*group.shown, *group.unused])),
        "shown": [_shown(row) for row in group.shown],
        "unused": [_shown(row) for row in group.unused],
    }


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's cells as text, the CSS class of its state, and the width of its padding bar (0 to 100)."""
    computed = computed_rows(row)
    failure = row.get("failure")
    return {
        "variant": variant(row) or "–",
        "bucket": f"{row['bucket']:,}",
        "state": row["state"].replace("_", " "),
        "state_class": "captured" if row["state"] == "captured" else "failed" if failure else "",
        "failure": failure,
        "replays": f"{row['replays']:,}",
        "padding": percent(row["padded_rows"], computed),
        "padding_width": _share(row["padded_rows"], computed),
        "bytes": human_bytes(row["bytes"]),
        "capture": f"{row['capture_seconds']:.3f} s",
        "shadow": str(row.get("shadow", "")).replace("_", " "),
        "digest": row.get("digest", ""),
    }


def _share(part: int, whole: int) -> int:
    return round(100 * part / whole) if whole else 0
