"""Details of the pages that neither Sphinx nor the theme has a setting for."""

from __future__ import annotations

import html
import inspect
import re
from typing import Any

from sphinx.application import Sphinx
from sphinx.util.inspect import stringify_signature

TABLE = re.compile(r"<table.*?</table>", re.DOTALL)
HEAD = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL)
BODY = re.compile(r"<tbody>.*</tbody>", re.DOTALL)
ROW = re.compile(r"<tr\b.*?</tr>", re.DOTALL)
WIDE = 4  # columns; a phone has room for fewer
CODE = re.compile(r'<span class="pre">[^<]*</span>')
LONG = 16  # characters; shorter names fit into any column


def breakable_names(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Let long names in tables break after an underscore, slash or dot, so that a narrow screen shows them whole."""

    def code(match: re.Match[str]) -> str:
        text = match[0]
        return (
            re.sub(r"(?<=\w)([_/]|\.(?=\w{5}))(?=\w)", r"\1<wbr>", text)
            if len(text) > LONG + len('<span class="pre"></span>')
            else text
        )

    if "body" in context:
        context["body"] = TABLE.sub(lambda table: CODE.sub(code, table[0]), context["body"])


def label_cells(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Give the cells of wide tables their column's name: on a narrow screen the style shows each row as a list."""

    def table(match: re.Match[str]) -> str:
        names = [html.escape(html.unescape(re.sub(r"<[^>]+>", "", head)).strip()) for head in HEAD.findall(match[0])]
        if len(names) < WIDE:
            return match[0]

        def row(found: re.Match[str]) -> str:
            columns = iter(names)
            return re.sub(r"<td\b", lambda _: f'<td data-label="{next(columns, "")}"', found[0])

        labelled = BODY.sub(lambda body: ROW.sub(row, body[0]), match[0])
        return re.sub(r'<table class="', '<table class="wide ', labelled, count=1)

    if "body" in context:
        context["body"] = TABLE.sub(table, context["body"])


def show_fields(app: Sphinx, what: str, name: str, obj: Any, options: object, signature: str, returns: str) -> Any:
    """Show the fields of a settings class, whose `__new__` takes anything in order to name misspelt ones."""
    from graph_cache.utils.validation import NamesFields

    if what == "class" and issubclass(obj, NamesFields):
        return stringify_signature(
            inspect.signature(obj), show_return_annotation=False, unqualified_typehints=True
        ), None
    return None


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect them to Sphinx."""
    app.connect("html-page-context", breakable_names)
    app.connect("html-page-context", label_cells)
    app.connect("autodoc-process-signature", show_fields)
    return {"parallel_read_safe": True}
