"""The deployment files as plain values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"


def load(path: str) -> Any:
    """Load a YAML document under deploy/. A duplicate key is an error."""
    return yaml.load((DEPLOY / path).read_text(encoding="utf-8"), Loader=_Strict)


def rules() -> list[dict[str, Any]]:
    """All rules of alerts.yml."""
    return [rule for group in load("prometheus/alerts.yml")["groups"] for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    """Alert name -> alert."""
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def dashboard() -> dict[str, Any]:
    """The Grafana dashboard."""
    return json.loads((DEPLOY / "grafana/dashboards/encore.json").read_text(encoding="utf-8"))


def expressions() -> Iterator[tuple[str, str]]:
    """Yield (location, PromQL) of each rule, panel, annotation and variable. Dashboard variables are filled in."""
    for rule in rules():
        yield f"alerts.yml {rule.get('alert') or rule['record']}", rule["expr"]
    board = dashboard()
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield f"dashboard, {panel['title']}", filled(target["expr"])
    for annotation in board["annotations"]["list"]:
        yield f"dashboard, {annotation['name']}", filled(annotation["expr"])
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            definition = filled(variable["definition"])
            yield f"dashboard, ${variable['name']}", re.sub(r"^label_values\((.*), *\w+\)$", r"\1", definition)


def filled(query: str) -> str:
    """Replace the dashboard's variables in a query."""
    for name, value in {"$job": "encore", "$instance": ".*", "$__rate_interval": "1m"}.items():
        query = query.replace(name, value)
    return query


class _Strict(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)
