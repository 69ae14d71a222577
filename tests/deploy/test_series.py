"""Every series and label that rules and dashboard use exists on a live server's /metrics."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.core.captures import ASKED
from graph_cache.core.keys import STALE
from graph_cache.core.stats import CacheStats
from server.observability.metrics import graph_families
from tests.deploy.files import expressions, rules
from tests.deploy.promql import PromqlError, reads
from tests.server.conftest import RunningServer, running, tiny_config

PROMETHEUS_OWN = {"up": {}}
SCRAPED_LABELS = {"job", "instance"}  # added by Prometheus to each series
# Label values that a healthy server may not have yet.
ABSENT_VALUES = {("status", str(status.value)) for status in HTTPStatus}

Labels = dict[str, set[str]]


@pytest.fixture(scope="module")
def live(tiny_model: Path) -> Iterator[RunningServer]:
    with running(tiny_config(tiny_model, graph_buckets=(1, 2), max_num_seqs=2)) as handle:
        body = {"prompt": "red bird", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "n": 2}
        for _ in range(2):
            handle.answer("/v1/completions", body)
        assert handle.http.get("/nothing").status_code == 404
        handle.wait_idle()
        yield handle


@pytest.fixture(scope="module")
def series(live: RunningServer) -> dict[str, Labels]:
    """Sample name -> label -> values, from a live /metrics page; series of failures from a CacheStats with failures."""
    found: dict[str, Labels] = defaultdict(lambda: defaultdict(set))
    stats = CacheStats()
    stats.failed_captures["decode", "block"] += 1
    stats.invalidations[STALE] += 1
    stats.invalidations[ASKED] += 1
    for family in (*text_string_to_metric_families(live.http.get("/metrics").text), *graph_families(stats.snapshot())):
        for sample in family.samples:
            for label, value in sample.labels.items():
                found[sample.name][label].add(value)
            found[sample.name].setdefault("job", set()).add("encore")
    return found


def faults(expression: str, series: dict[str, Labels], recorded: set[str]) -> list[str]:
    """Return the series and labels of an expression that don't exist."""
    wrong, read = [], reads(expression)
    everywhere: Labels = defaultdict(set)
    for labels in series.values():
        for label, values in labels.items():
            everywhere[label] |= values
    reachable = set(SCRAPED_LABELS)
    for selector in read.selectors:
        labels = series.get(selector.name, PROMETHEUS_OWN.get(selector.name, {}))
        if selector.name not in (*series, *PROMETHEUS_OWN, *recorded):
            wrong.append(f"there is no {selector.name}")
        reachable |= set(labels)
        for label, operator, value in selector.matchers:
            if label not in {*labels, *SCRAPED_LABELS}:
                wrong.append(f"{selector.name} has no label {label}")
            elif operator in ("=~", "!~"):
                re.compile(value)
            elif value not in everywhere[label] and (label, value) not in ABSENT_VALUES:
                wrong.append(f"{label} is never {value}")
    wrong += [f"nothing read has the label {label}" for label in sorted(read.labels - reachable)]
    return wrong


def recorded() -> set[str]:
    return {rule["record"] for rule in rules() if "record" in rule}


def test_every_series_and_label_exists(series: dict[str, Labels]) -> None:
    known = recorded()
    found = [f"{where}: {fault}" for where, expression in expressions() for fault in faults(expression, series, known)]
    assert found == []


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("rate(encore_graph_hits_total[5m])", "there is no encore_graph_hits_total"),
        ("encore:hit_ratio:rate5m < 1", "there is no encore:hit_ratio:rate5m"),
        ('encore_graph_fallbacks_total{cause="x"}', "encore_graph_fallbacks_total has no label cause"),
        ('encore_graph_fallbacks_total{phase="decoding"}', "phase is never decoding"),
        ("sum by (model_name) (encore_num_requests_running)", "nothing read has the label model_name"),
        ("sum without (replica) (rate(encore_graph_replays_total[5m]))", "nothing read has the label replica"),
    ],
)
def test_a_missing_series_or_label_is_reported(expression, fault, series) -> None:
    assert faults(expression, series, recorded()) == [fault]


def test_the_tokenizer_reads_selectors_and_label_lists() -> None:
    read = reads(
        'sum without (a, b) (rate(x_total{l="v,}", m=~"w.*"}[5m] offset 1d)) / on (c) group_left (d) y:z > 1.5e3'
    )
    assert [(one.name, one.matchers) for one in read.selectors] == [
        ("x_total", [("l", "=", "v,}"), ("m", "=~", "w.*")]),
        ("y:z", []),
    ]
    assert read.labels == {"a", "b", "c", "d"}


@pytest.mark.parametrize("expression", ["sum(x", "x{a=b}", "x{a=", "x ; y"])
def test_the_tokenizer_refuses_invalid_promql(expression) -> None:
    with pytest.raises(PromqlError):
        reads(expression)
