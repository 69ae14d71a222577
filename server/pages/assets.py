"""Pages that load their style and modules from this server, such as /chat and /docs, and the files that they load.

Such a page has no inline style or script, so its Content-Security-Policy allows this server's files only.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from server.pages.page import HEADERS

ASSET_HEADERS = {
    "Cache-Control": "no-cache",  # ask each time; the answer is a 304 until the file changes
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


def policy_headers(*further: str) -> dict[str, str]:
    """Return the headers of a page that loads its files from this server, with `further` directives of its policy."""
    return HEADERS | {"Content-Security-Policy": "; ".join((_POLICY, *further))}


class Assets(StaticFiles):
    """The files in `static/NAME` and `static/shared`, and the files of other `packages`, with `ASSET_HEADERS`.

    `packages` are pairs of an installed package and a folder in it. The package is found, not imported.
    """

    def __init__(self, name: str, *packages: tuple[str, str]) -> None:
        own = [(__package__, f"static/{folder}") for folder in (name, "shared")]
        super().__init__(packages=[*own, *packages])

    def file_response(self, *args: Any, **options: Any) -> Response:
        response = super().file_response(*args, **options)
        response.headers.update(ASSET_HEADERS)
        return response
