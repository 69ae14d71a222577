"""The status page: one document without external assets, filled by its script from GET / as JSON every second.

Knows the values of `status.py` and HTML. Nothing is put into the markup here, and the script writes text nodes only, so
there is nothing to escape; the policy names the page's own style and script by hash and allows nothing else.
"""

from __future__ import annotations

import base64
import hashlib

from server.pages.status_script import SCRIPT

STYLE = """
:root { color-scheme: light dark; --page: #f4f5f7; --card: #fff; --line: #dfe3e8; --text: #16191d; --dim: #626b77;
  --mark: #0b7a6f; --fill: #0b7a6f1f; --track: #e8ebef; --warn: #9a5b00; --warnbar: #d98a1c; --bad: #b3261e;
  --badfill: #b3261e14; --ok: #1b7f46; }
@media (prefers-color-scheme: dark) { :root { --page: #0e1114; --card: #161a1f; --line: #272d35; --text: #e7eaee;
  --dim: #929ca9; --mark: #4cc9b6; --fill: #4cc9b626; --track: #262c34; --warn: #f0b45a; --warnbar: #d9963a;
  --bad: #ff8f86; --badfill: #ff8f861f; --ok: #66cf95; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.25rem; max-width: 80rem; background: var(--page); color: var(--text);
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: .25rem .9rem; margin-bottom: 1rem; }
h1 { font-size: 1.35rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: .8rem; font-weight: 600; color: var(--dim); margin: 0; }
.facts { color: var(--dim); margin: 0; flex-basis: 100%; }
.pill { font-weight: 600; font-size: .85rem; white-space: nowrap; color: var(--dim); }
.pill::before { content: ""; display: inline-block; width: .6rem; height: .6rem; border-radius: 50%;
  margin-right: .4rem;
  background: currentColor; }
.pill.ready { color: var(--ok); } .pill.loading, .pill.recovering, .pill.draining { color: var(--warn); }
.pill.dead, .pill.unreachable { color: var(--bad); }
#banner { background: var(--badfill); border: 1px solid var(--bad); border-radius: 8px; padding: .6rem .9rem;
  margin: 0 0 1rem; overflow-wrap: anywhere; }
main { display: grid; gap: .75rem; grid-template-columns: repeat(12, 1fr); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: .8rem .95rem;
  min-width: 0; }
.chart { grid-column: span 3; display: flex; flex-direction: column; } .gauge { grid-column: span 3; }
.table { grid-column: span 8; } .side { grid-column: span 4; }
.value { font-size: 1.75rem; line-height: 1.3; font-variant-numeric: tabular-nums; letter-spacing: -.01em; }
.value small { font-size: .9rem; color: var(--dim); letter-spacing: 0; }
.under { color: var(--dim); font-size: .85rem; font-variant-numeric: tabular-nums; min-height: 1.3rem; }
svg { display: block; width: 100%; height: 4.25rem; margin-top: .5rem; overflow: visible; touch-action: pan-y; }
.main-line { fill: none; stroke: var(--mark); stroke-width: 1.75; vector-effect: non-scaling-stroke;
  stroke-linejoin: round; }
.other-line { fill: none; stroke: var(--dim); stroke-width: 1; vector-effect: non-scaling-stroke;
  stroke-dasharray: 3 2; }
.area { fill: var(--fill); stroke: none; }
.base { stroke: var(--line); stroke-width: 1; vector-effect: non-scaling-stroke; }
.hair { stroke: var(--dim); stroke-width: 1; vector-effect: non-scaling-stroke; }
.scale { display: flex; justify-content: space-between; color: var(--dim); font-size: .75rem; margin-top: .2rem;
  font-variant-numeric: tabular-nums; }
.track { display: block; height: .45rem; border-radius: 99px; background: var(--track); overflow: hidden;
  margin: .4rem 0 .25rem; }
.track i { display: block; height: 100%; width: 0; background: var(--mark); }
.track.waste i { background: var(--warnbar); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; margin-top: .5rem; }
th { text-align: right; font-size: .8rem; font-weight: 600; color: var(--dim); padding: .25rem .5rem;
  white-space: nowrap; }
td { text-align: right; padding: .28rem .5rem; border-top: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { padding-left: 0; } th:last-child, td:last-child { padding-right: 0; }
td .track { display: inline-block; width: 5.5rem; margin: 0 .5rem 0 0; vertical-align: middle; }
td .number { display: inline-block; min-width: 3.2rem; }
tr.idle td { color: var(--dim); } .failed { color: var(--bad); }
.head { display: flex; justify-content: space-between; align-items: baseline; gap: 1rem; }
button { font: inherit; font-size: .85rem; color: var(--mark); background: none; border: 0; padding: .1rem 0;
  cursor: pointer;
  text-decoration: underline; text-underline-offset: 2px; }
dl { margin: .35rem 0 0; } dl div { display: flex; justify-content: space-between; gap: 1rem; padding: .22rem 0;
  border-top: 1px solid var(--line); } dl div:first-child { border-top: 0; }
dt { color: var(--dim); } dd { margin: 0; text-align: right; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere; }
.side section + section { margin-top: 1.1rem; }
footer { color: var(--dim); font-size: .85rem; margin-top: 1rem; display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; }
a { color: inherit; } a:hover, button:hover { color: var(--text); }
:focus-visible { outline: 2px solid var(--mark); outline-offset: 2px; border-radius: 3px; }
.stale main { opacity: .5; }
[hidden] { display: none !important; }
@media (max-width: 64rem) { .chart, .gauge { grid-column: span 6; } .table, .side { grid-column: 1 / -1; } }
@media (max-width: 40rem) { body { padding: .75rem; } main { gap: .6rem; } svg { height: 3.25rem; margin-top: auto; }
  .card { padding: .7rem .8rem; } .value { font-size: 1.35rem; } .under { margin-bottom: .4rem;
  } .wide { display: none; }
  td .track { width: 2.6rem; margin-right: .35rem; } th, td { padding-left: .25rem; padding-right: .25rem; } }
"""

_CHARTS = (("tokens", "Output tokens per second"), ("requests", "Requests"), ("first", "Time to first token"),
           ("next", "Time between tokens"))  # fmt: skip
_GAUGES = (("kv", "KV cache"), ("prefix", "Prompt tokens from the prefix cache"), ("hits", "Decode steps replayed"),
           ("padding", "Padding in decode steps"))  # fmt: skip


def _chart(name: str, title: str) -> str:
    return (
        f'<section class="card chart" id="{name}"><h2>{title}</h2><div class="value">–</div><div class="under"></div>'
        f'<svg viewBox="0 0 300 68" preserveAspectRatio="none" role="img" aria-label="{title}, the last five minutes">'
        '</svg><div class="scale"><span></span><span></span></div></section>'
    )


def _gauge(name: str, title: str) -> str:
    waste = " waste" if name == "padding" else ""
    return (
        f'<section class="card gauge" id="{name}"><h2>{title}</h2><div class="value">–</div>'
        f'<span class="track{waste}"><i></i></span><div class="under"></div></section>'
    )


BODY = f"""
<header><h1 id="model">Encore</h1><span class="pill" id="state" role="status">connecting</span>
<p class="facts" id="facts"></p></header>
<p id="banner" role="alert" hidden></p>
<main>{"".join(_chart(*one) for one in _CHARTS)}{"".join(_gauge(*one) for one in _GAUGES)}
<section class="card table"><div class="head"><h2>Decode graphs by batch size</h2>
<button id="more" hidden></button></div>
<table><thead><tr><th scope="col">Bucket</th><th scope="col">Steps</th><th scope="col">Replayed</th>
<th scope="col">Padding</th><th scope="col" class="wide">Graphs</th><th scope="col" class="wide">Largest</th></tr>
</thead><tbody id="buckets"></tbody></table></section>
<div class="card side"><section><h2>Engine</h2><dl id="engine"></dl></section>
<section><h2>Sequences ended</h2><dl id="ended"></dl></section>
<section id="eager-part"><h2>Decode steps that ran eager</h2><dl id="eager"></dl></section></div></main>
<footer><span id="version">Encore</span><a href="graphs">Graph table</a><a href="metrics">Metrics</a>
<a href="ready">Readiness</a><a href="openapi.json">API</a></footer>
<noscript><p>This page needs scripts; the same values are at <a href="metrics">/metrics</a> and
<a href="graphs">/graphs</a>.</p></noscript>
"""


def _source(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; style-src {_source(STYLE)}; script-src {_source(SCRIPT)}; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# An icon in the page saves every browser's request for /favicon.ico.
_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Crect width='16' height='16' "
    "rx='4' fill='%230b7a6f'/%3E%3Cpath d='M4 11V5m4 6V8m4 3V3' stroke='white' stroke-width='2'/%3E%3C/svg%3E"
)
PAGE = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    f'<title>Encore</title><link rel="icon" href="{_ICON}"><style>{STYLE}</style></head>'
    f"<body>{BODY}<script>{SCRIPT}</script></body></html>\n"
)
