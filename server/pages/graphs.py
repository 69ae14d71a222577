"""The graph table for a browser: one page without external assets that keeps itself up to date.

Knows the rows of GET /graphs and HTML. Every value is escaped: names come from configurations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

REFRESH_SECONDS = 2

_STYLE = """
:root { color-scheme: light dark; --line: #d5d9e0; --soft: #f3f5f8; --text: #1b1f24; --dim: #5b6470; --bar: #2f6fed;
  --ok: #176f3c; --bad: #b3261e; --page: #fff; }
@media (prefers-color-scheme: dark) { :root { --line: #343a44; --soft: #1d2127; --text: #e6e9ee; --dim: #98a2b0;
  --bar: #6a9bff; --ok: #6fd39a; --bad: #ff8f86; --page: #14171b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; background: var(--page); color: var(--text);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.25rem; margin: 0 0 .75rem; overflow-wrap: anywhere; }
dl { display: flex; flex-wrap: wrap; gap: .5rem; margin: 0 0 1rem; }
dl div { background: var(--soft); border: 1px solid var(--line); border-radius: 8px; padding: .4rem .8rem;
  flex: 1 1 7.5rem; }
dt { color: var(--dim); font-size: .8rem; } dd { margin: 0; font-size: 1.1rem; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; white-space: nowrap; }
th, td { padding: .35rem .7rem; text-align: left; border-bottom: 1px solid var(--line); }
tr:last-child td { border-bottom: 0; }
th { background: var(--soft); font-weight: 600; font-size: .8rem; color: var(--dim); }
.n { text-align: right; font-variant-numeric: tabular-nums; }
.bar { display: inline-block; width: 4rem; height: .55rem; margin-right: .4rem; border-radius: 3px;
  background: var(--line); overflow: hidden; }
.bar i { display: block; height: 100%; background: var(--bar); }
.captured { color: var(--ok); } .failed { color: var(--bad); }
.note { color: var(--dim); font-size: .85rem; white-space: normal; }
@media (max-width: 40rem) { body { padding: .6rem; font-size: 14px; } th, td { padding: .35rem .45rem; }
  th:nth-child(n+7), td:nth-child(n+7) { display: none; } .bar { width: 2rem; } }
"""

# The page swaps in its own newer <main>: no flicker, the scroll position stays. Without scripts the whole page reloads.
_SCRIPT = """
const note = document.getElementById("note");
let asking = false;
setInterval(async () => {
  if (document.hidden || asking) return;
  asking = true;
  try {
    const answer = await fetch(location.href, { headers: { Accept: "text/html" }, cache: "no-store" });
    if (!answer.ok) throw new Error("the server answers " + answer.status);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
    const left = document.querySelector(".scroll") ? document.querySelector(".scroll").scrollLeft : 0;
    document.querySelector("main").replaceWith(fresh);
    if (document.querySelector(".scroll")) document.querySelector(".scroll").scrollLeft = left;
    note.textContent = "";
  } catch (error) { note.textContent = "Not up to date: " + error.message; }
  asking = false;
}, SECONDS * 1000);
"""

_COLUMNS = ("Site", "Bucket", "State", "Replays", "Padding", "Bytes", "Capture", "Scope", "Phase", "Engine")
_NUMERIC = frozenset({"Bucket", "Replays", "Bytes", "Capture"})


def render_graphs_page(body: Mapping[str, Any]) -> str:
    """The whole HTML document for a body of GET /graphs."""
    rows = body["graphs"]
    model = escape(str(body["model"]))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Graphs of {model} · Encore</title><style>{_STYLE}</style>"
        f'<noscript><meta http-equiv="refresh" content="{REFRESH_SECONDS}"></noscript></head>'
        f"<body><main><h1>Graphs of {model}</h1>{_summary(body, rows)}{_table(rows)}</main>"
        '<p class="note" id="note" role="status"></p>'
        f"<script>{_SCRIPT.replace('SECONDS', str(REFRESH_SECONDS))}</script></body></html>\n"
    )


def _summary(body: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> str:
    rows = list(rows)
    captured = [row for row in rows if row["state"] == "captured"]
    padded = sum(row["padded_rows"] for row in rows)
    computed = sum(row["replays"] * row["bucket"] for row in rows)
    facts = {
        "Captured": f"{len(captured)} of {len(rows)}",
        "Replays": f"{sum(row['replays'] for row in rows):,}",
        "Padding": _percent(padded, computed),
        "Memory": human_bytes(sum(row["bytes"] for row in rows)),
    }
    warm = body.get("warm", {})
    if "mode" in warm:
        facts["Warm-up"] = str(warm["mode"])
    if "ratio" in warm:
        facts["Warm"] = _percent(warm["ratio"], 1)
    return "<dl>" + "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items()) + "</dl>"


def _table(rows: Iterable[Mapping[str, Any]]) -> str:
    lines = [_row(row) for row in rows]
    if not lines:
        return '<p class="note">No graphs are wanted: the engine runs eager.</p>'
    heads = "".join(f'<th scope="col"{_class(name)}>{name}</th>' for name in _COLUMNS)
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _row(row: Mapping[str, Any]) -> str:
    computed = row["replays"] * row["bucket"]
    share = row["padded_rows"] / computed if computed else 0.0
    bar = f'<span class="bar"><i style="width:{100 * share:.0f}%"></i></span>{_percent(row["padded_rows"], computed)}'
    state, why = str(row["state"]), row.get("failure")
    shown_state = escape(state.replace("_", " ")) + (f'<div class="note">{escape(str(why))}</div>' if why else "")
    cells = {
        "Site": escape(site_name(row)),
        "Scope": escape(str(row["scope"])),
        "Phase": escape(str(row["phase"])),
        "Bucket": f"{row['bucket']:,}",
        "State": f'<span class="{"captured" if state == "captured" else "failed" if why else ""}">{shown_state}</span>',
        "Replays": f"{row['replays']:,}",
        "Padding": bar,
        "Bytes": escape(human_bytes(row["bytes"])),
        "Capture": f"{row['capture_seconds']:.3f} s",
        "Engine": escape(str(row.get("engine", ""))),
    }
    return "<tr>" + "".join(f"<td{_class(name)}>{cells[name]}</td>" for name in _COLUMNS) + "</tr>"


def site_name(row: Mapping[str, Any]) -> str:
    """A row's site, with the values that its graph was captured for beside the bucket."""
    statics = ", ".join(f"{name}={value}" for name, value in (row.get("statics") or {}).items())
    return f"{row['site']} ({statics})" if statics else str(row["site"])


def human_bytes(count: int) -> str:
    """A byte count with a binary unit and three digits at most."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _class(column: str) -> str:
    return ' class="n"' if column in _NUMERIC else ""


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "–"
