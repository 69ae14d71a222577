"""Assemble a page from `static/`: one document that holds its style and its script and loads nothing.

The files are Jinja templates (HTML), and style and script as they are (CSS, JS). Values are escaped by the template
engine. The page's Content-Security-Policy names its own style and script by their hashes and allows nothing else.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

# Headers of a route that answers a browser with a page and others with JSON, on both answers.
HEADERS = {
    "Vary": "Accept",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def _read(name: str) -> str:
    return files(__package__).joinpath("static", name).read_text("utf-8")


_TEMPLATES = Environment(
    loader=FunctionLoader(_read),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


class Page:
    """The page of `static/NAME.html`, `static/NAME.css` and `static/NAME.js`.

    `headers` are those of an answer with the page, its Content-Security-Policy among them.

    Raises:
        FileNotFoundError: one of the files is missing.
    """

    def __init__(self, name: str) -> None:
        style, script = _read(f"{name}.css"), _read(f"{name}.js")
        policy = (
            f"default-src 'none'; style-src {_source(style)}; script-src {_source(script)}; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        self.headers = HEADERS | {"Content-Security-Policy": policy}
        self._template = _TEMPLATES.get_template(f"{name}.html")
        # An icon in the page saves every browser's request for /favicon.ico.
        icon = "data:image/svg+xml," + quote(_read("icon.svg").strip())
        self._inlined = {"style": Markup(style), "script": Markup(script), "icon": icon}

    def render(self, **values: Any) -> str:
        """Return the HTML document with `values` in it, escaped.

        Raises:
            jinja2.UndefinedError: the template reads a value that is not given.
        """
        return self._template.render(**values, **self._inlined)


def _source(text: str) -> str:
    """A policy's source expression that allows exactly this inline style or script."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"
