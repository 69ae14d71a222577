"""Graphs and replays, padding, and failures have the same colours on pages, pictures and the dashboard."""

from __future__ import annotations

import json
import re

import pytest

from tests.deploy.files import DEPLOY, ROOT

LIGHT, DARK = (
    dict(re.findall(r"--(mark|waste|bad): (#[0-9a-f]{6})", part))
    for part in (ROOT / "server/pages/static/shared/theme.css").read_text("utf-8").split("@media")[:2]
)
PANELS = {
    panel["title"]: panel["fieldConfig"]
    for panel in json.loads((DEPLOY / "grafana/dashboards/encore.json").read_text("utf-8"))["panels"]
    if panel["type"] == "timeseries"
}


@pytest.mark.parametrize(
    ("title", "meaning"),
    [("Graph hit rate", "mark"), ("Replays by bucket", "mark"), ("Padding", "waste"), ("Fallbacks by reason", "waste")],
)
def test_the_dashboard_has_the_colours_of_the_pages(title: str, meaning: str) -> None:
    assert PANELS[title]["defaults"]["color"] == {"mode": "shades", "fixedColor": DARK[meaning]}


def test_failed_captures_are_red_on_the_dashboard() -> None:
    [override] = PANELS["Captures"]["overrides"]
    assert override["properties"][0]["value"]["fixedColor"] == DARK["bad"]


def test_pictures_have_the_colours_of_the_pages() -> None:
    style = (ROOT / "docs/pictures/svg.py").read_text("utf-8")
    for kind, meaning in (("teal", "mark"), ("orange", "waste")):
        assert re.findall(rf"\.{kind} .*stroke: (#\w+)", style) == [LIGHT[meaning], DARK[meaning]]
