"""Tables of the reference pages, made from the code: settings, metrics, HTTP routes and request fields.

Directives: `settings-table` with `server` or `engine`; `command-table` with the words of a command; `metrics-table`;
`routes-table`; `fields-table` with the name of a schema in /openapi.json, and that of a field to list the object in it;
`class-table` with the dotted name of a dataclass. Metrics and routes are those of a server that runs a tiny model while
the site is built.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import importlib
import inspect
import logging
import re
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

COMMENTED = re.compile(r"^    (\w+): .*?  # (.*)$", re.MULTILINE)  # a field of a dataclass
FLAG = re.compile(r"(?<![`\w-])--[a-z][a-z-]+")


def settings_rows(kind: str) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Return head and rows of the settings of `encore serve`: those of the server or of the engine."""
    from engine.config import EngineConfig
    from server.cli.flags import ENGINE_HELP, SERVER_HELP, SERVING_DEFAULTS
    from server.cli.settings import NOT_OFFERED
    from server.config import ServerConfig

    config_class, helps = {"server": (ServerConfig, SERVER_HELP), "engine": (EngineConfig, ENGINE_HELP)}[kind]
    rows: list[Sequence[str]] = []
    for field in dataclasses.fields(config_class):
        if field.name not in NOT_OFFERED:
            default = SERVING_DEFAULTS.get(field.name, field.default)
            rows.append((f"`--{field.name.replace('_', '-')}`", _shown(default), helps[field.name]))
    return ("flag", "default", "meaning"), rows


def command_rows(*words: str) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Return head and rows of a command's arguments, without those that are settings."""
    from server.cli.main import command_parser
    from server.cli.settings import setting_types

    rows: list[Sequence[str]] = []
    for action in command_parser(*words).actions():
        is_setting = action.dest in setting_types() and action.default == argparse.SUPPRESS  # as flags.py adds them
        if is_setting or isinstance(action.choices, dict) or "--help" in action.option_strings:
            continue
        name = max(action.option_strings, key=len, default=str(action.metavar or action.dest))
        value = action.metavar if action.option_strings and action.nargs != 0 else None
        if action.choices and action.option_strings:
            value = "|".join(map(str, action.choices))
        text = str(action.help or "").replace("%(default)s", str(action.default))
        rows.append((f"`{name} {value}`" if value else f"`{name}`", text))
    return ("argument", "meaning"), rows


def _shown(default: Any) -> str:
    if default in (None, (), "") or default is dataclasses.MISSING:
        return ""
    if isinstance(default, (tuple, list)):
        return f"`{','.join(map(str, default))}`"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def class_rows(path: str) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Return head and rows of the fields of a dataclass, with the comments beside them in its source."""
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    meanings = dict(COMMENTED.findall(inspect.getsource(found)))
    rows = [(f"`{field.name}`", f"`{field.type}`", meanings[field.name]) for field in dataclasses.fields(found)]
    return ("field", "type", "meaning"), rows


def metrics_rows() -> tuple[Sequence[str], list[Sequence[str]]]:
    """Return head and rows of the metrics that a server exports."""
    from prometheus_client.parser import text_string_to_metric_families

    rows = []
    for family in text_string_to_metric_families(_server()[0]):
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        name = family.name + ("_total" if family.type == "counter" else "")
        labelled = f"{name}{{{', '.join(labels)}}}" if labels else name
        rows.append((f"`{labelled}`", family.type, family.documentation))
    return ("metric{labels}", "type", "meaning"), sorted(rows)


def routes_rows() -> tuple[Sequence[str], list[Sequence[str]]]:
    """Return head and rows of the HTTP routes."""
    rows = []
    for path, methods in _server()[1]["paths"].items():
        for method, route in methods.items():
            schemes = {name for one in route.get("security", ()) for name in one}
            key = "admin key" if "admin_key" in schemes else "API key" if schemes else "none"
            summary = (route.get("description") or route.get("summary", "")).partition("\n")[0]
            rows.append((f"`{method.upper()} {path}`", key, summary))
    return ("route", "key", "purpose"), rows


def fields_rows(schema: str, within: str | None = None) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Return head and rows of the fields of a schema in /openapi.json that a request may use to some effect.

    `within` names a field of the schema: then the fields of the object in it.
    """
    schemas = _server()[1]["components"]["schemas"]
    found = schemas[schema]
    if within is not None:
        found = next(one for one in found["properties"][within]["anyOf"] if one["type"] == "object")
    required = set(found.get("required", ()))
    rows = []
    for name, field in found["properties"].items():
        if not _has_effect(field):
            continue
        default = "required" if name in required else _shown(field.get("default"))
        rows.append((f"`{name}`", _type(field), default, _meaning(field)))
    return ("field", "type", "default", "meaning"), rows


def _has_effect(field: dict[str, Any]) -> bool:
    return not field.get("description", "").startswith(("not supported: ", "no effect: "))


def _meaning(field: dict[str, Any]) -> str:
    """Return the description of a field and its range."""
    least = field.get("minimum", field.get("exclusiveMinimum"))
    most = field.get("maximum")
    limits = ""
    if least is not None and most is not None and abs(most) < 2**31 - 1:
        limits = f"{'above ' if 'exclusiveMinimum' in field else ''}{least:g} to {most:g}"
    elif least is not None and abs(least) < 2**31 - 1:
        limits = f"{least:g} and up"
    return "; ".join(filter(None, (field.get("description", ""), limits)))


def _type(field: dict[str, Any]) -> str:
    if "$ref" in field:
        return "`" + field["$ref"].rpartition("/")[2] + "`"
    kinds = field.get("anyOf") or field.get("oneOf")
    if kinds:
        return " or ".join(dict.fromkeys(_type(one) for one in kinds if one.get("type") != "null"))
    if field.get("type") == "array":
        return "list of " + _type(field.get("items", {}))
    return str(field.get("type", "any"))


@functools.cache
def _server() -> tuple[str, dict[str, Any]]:
    """Return the /metrics page and /openapi.json of a server that has answered one request."""
    logging.disable(logging.WARNING)  # not part of Sphinx's output
    try:
        with tempfile.TemporaryDirectory() as folder:
            return asyncio.run(_ask_a_server(folder))
    finally:
        logging.disable(logging.NOTSET)


async def _ask_a_server(folder: str) -> tuple[str, dict[str, Any]]:
    import httpx

    from benchmarks.shapes import write_shape
    from engine.client.async_client import make_client
    from engine.config import EngineConfig
    from server.app import create_app
    from server.config import ServerConfig

    engine = EngineConfig(
        model=write_shape("tiny", folder), load_format="dummy", device="cpu", max_num_seqs=2, max_model_len=64,
        warmup="full", graph_manifest="none", num_threads=1,
    )  # fmt: skip
    config = ServerConfig(engine=engine, in_process=True)
    app = create_app(make_client(engine, in_process=True), config)
    transport = httpx.ASGITransport(app=app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://docs") as http:
        while (await http.get("/ready")).status_code != 200:
            await asyncio.sleep(0.1)
        answer = await http.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 4})
        answer.raise_for_status()
        return (await http.get("/metrics")).text, (await http.get("/openapi.json")).json()


class _TableDirective(SphinxDirective):
    """Base of the directives: a table from the rows of a function."""

    def table(self, head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[nodes.Node]:
        def line(cells: Iterable[str]) -> str:
            return (
                "| "
                + " | ".join(FLAG.sub(r"`\g<0>`", cell).replace("|", "\\|").replace("\n", " ") for cell in cells)
                + " |"
            )

        text = [line(head), line("---" for _ in head), *map(line, rows)]
        return self.parse_text_to_nodes("\n".join(text) + "\n")


class SettingsTable(_TableDirective):
    """`settings-table`: flags with defaults and help texts; the argument is `server` or `engine`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return self.table(*settings_rows(self.arguments[0]))


class CommandTable(_TableDirective):
    """`command-table`: the arguments of a command, such as `bench serve`."""

    required_arguments = 1
    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        return self.table(*command_rows(*self.arguments))


class MetricsTable(_TableDirective):
    """`metrics-table`: the metrics of /metrics."""

    def run(self) -> list[nodes.Node]:
        return self.table(*metrics_rows())


class RoutesTable(_TableDirective):
    """`routes-table`: the HTTP routes."""

    def run(self) -> list[nodes.Node]:
        return self.table(*routes_rows())


class FieldsTable(_TableDirective):
    """`fields-table`: the fields of a request schema, or of an object in one of its fields."""

    required_arguments = 1
    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        return self.table(*fields_rows(*self.arguments))


class ClassTable(_TableDirective):
    """`class-table`: the fields of a dataclass, each with the comment beside it."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return self.table(*class_rows(self.arguments[0]))


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.add_directive("settings-table", SettingsTable)
    app.add_directive("command-table", CommandTable)
    app.add_directive("metrics-table", MetricsTable)
    app.add_directive("routes-table", RoutesTable)
    app.add_directive("fields-table", FieldsTable)
    app.add_directive("class-table", ClassTable)
    return {"parallel_read_safe": True}
