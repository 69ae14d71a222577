"""Assemble a page from `static/`: one document with inline style and script that loads nothing else.

Larger pages load their files; see assets.py.

The HTML files are Jinja templates; CSS and JS files are inserted unchanged. The template engine escapes all values. The
page's Content-Security-Policy allows its own style and script by their hashes and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

# Headers of routes that return a page to browsers and JSON to other clients, for both.
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
    """The page of `static/NAME.html`, `static/NAME.css` and `static/NAME.js`, in the style of `static/shared`.

    `headers` are the response headers for the page, including its Content-Security-Policy.

    Raises:
        FileNotFoundError: one of the files is missing.
    """

    def __init__(self, name: str) -> None:
        style = "".join(map(_read, ("shared/theme.css", "shared/board.css", f"{name}.css")))
        script = _read(f"{name}.js")
        policy = (
            f"default-src 'none'; style-src {_source(style)}; script-src {_source(script)}; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        self.headers = HEADERS | {"Content-Security-Policy": policy}
        self._name, self._inlined = f"{name}.html", {"style": Markup(style), "script": Markup(script)}

    def render(self, **values: Any) -> str:
        """Return the HTML document with `values` in it, escaped.

        Raises:
            jinja2.UndefinedError: the template reads a value that is not given.
        """
        return render(self._name, **values, **self._inlined)


def render(name: str, **values: Any) -> str:
    """Return the template `static/NAME` with `values` and the icon in it, escaped."""
    # An inline icon saves the browser's request for /favicon.ico.
    icon = "data:image/svg+xml," + quote(_read("icon.svg").strip())
    return _TEMPLATES.get_template(name).render(**values, icon=icon)


def _source(text: str) -> str:
    """Return the Content-Security-Policy source that allows exactly this inline style or script."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"
