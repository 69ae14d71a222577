"""The interactive API documentation of GET /docs: Swagger UI on this server's /openapi.json.

Swagger UI comes from the Python package fastapi-offline, so that the page works without access to other hosts. Only the
package's static files are used; none of its code is imported.
"""

from __future__ import annotations

from server.pages.assets import Assets, policy_headers
from server.pages.page import render

HEADERS = policy_headers()
DOCUMENT = render("docs.html")
SWAGGER_UI = ("fastapi_offline", "static")


class DocsAssets(Assets):
    """The files of the page, under /docs/."""

    def __init__(self) -> None:
        super().__init__("docs", SWAGGER_UI)
