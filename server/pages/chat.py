"""The chat page of GET /chat, and its modules and style under /chat/.

The page has no inline style or script, so its Content-Security-Policy allows this server's files only, and Trusted
Types refuse to turn text into markup.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from server.pages.page import HEADERS as PAGE_HEADERS
from server.pages.page import render

HEADERS = PAGE_HEADERS | {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
}
ASSET_HEADERS = {
    "Cache-Control": "no-cache",  # ask each time; the answer is a 304 until the file changes
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}
DOCUMENT = render("chat.html")


class Assets(StaticFiles):
    """The files in `static/chat`, with `ASSET_HEADERS`."""

    def __init__(self) -> None:
        super().__init__(packages=[(__package__, "static/chat")])

    def file_response(self, *args: Any, **options: Any) -> Response:
        response = super().file_response(*args, **options)
        response.headers.update(ASSET_HEADERS)
        return response
