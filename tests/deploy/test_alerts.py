"""Each alert has a severity, a runbook section and a unit test that fires it; the dashboard is complete."""

from __future__ import annotations

import re
from itertools import combinations

from tests.deploy.files import ROOT, alerts, dashboard, expressions, load, rules
from tests.deploy.promql import reads

RUNBOOK = "docs/runbook.md"
# Metrics that the dashboard must show.
SHOWN = """
encore_graph_batch_rows_total encore_graph_fallbacks_total encore_graph_padded_tokens_total encore_graph_captures_total
encore_graph_warm_ratio encore_time_to_first_token_seconds_bucket encore_inter_token_latency_seconds_bucket
encore_num_requests_waiting encore_kv_cache_usage_perc encore_num_preemptions_total encore_engine_restarts_total
""".split()


def test_each_alert_has_a_severity_and_a_summary() -> None:
    for name, alert in alerts().items():
        assert alert["labels"]["severity"] in ("critical", "warning"), name
        assert set(alert["annotations"]) == {"summary", "runbook"}, name


def test_each_alert_has_its_section_in_the_runbook_and_each_section_its_alert() -> None:
    sections = re.findall(r"^### (Encore\w+)$", (ROOT / RUNBOOK).read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(sections) == sorted(alerts())
    for name, alert in alerts().items():
        assert alert["annotations"]["runbook"] == f"{RUNBOOK}#{name.lower()}"


def test_each_section_says_what_it_means_what_to_look_at_and_what_to_do() -> None:
    text = (ROOT / RUNBOOK).read_text(encoding="utf-8")
    for section in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        name, _, body = section.partition("\n")
        for part in ("**Means**", "**Look at**", "**Do**"):
            assert part in body, f"{name} has no {part}"


def test_the_runbook_names_only_metrics_that_rules_or_dashboard_read() -> None:
    named = set(re.findall(r"\bencore_\w+\b", (ROOT / RUNBOOK).read_text(encoding="utf-8")))
    known = {one.name for _, expression in expressions() for one in reads(expression).selectors}
    assert named - known == set()


def test_each_alert_is_fired_by_a_unit_test() -> None:
    fired = {
        check["alertname"]
        for test in load("prometheus/alerts_test.yml")["tests"]
        for check in test["alert_rule_test"]
        if check["exp_alerts"]
    }
    assert fired == set(alerts())


def test_recorded_names_are_used() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    used = {one.name for rule in rules() for one in reads(rule["expr"]).selectors}
    assert recorded <= used


def test_the_dashboard_shows_what_an_operator_needs() -> None:
    shown = [expression for where, expression in expressions() if "dashboard" in where]
    read = {one.name for expression in shown for one in reads(expression).selectors}
    assert [name for name in SHOWN if name not in read] == []


def test_panels_have_unique_ids_and_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in combinations(panels, 2):
        a, b = one["gridPos"], other["gridPos"]
        apart_x = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        apart_y = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert apart_x or apart_y, f"{one['title']} lies over {other['title']}"
        assert a["x"] + a["w"] <= 24


def test_every_panel_uses_the_selected_source_and_has_a_description() -> None:
    for panel in dashboard()["panels"]:
        if panel["type"] != "row":
            assert panel["description"], panel["title"]
            sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
            assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources), panel["title"]
