"""The status page of GET /. It is static; its script fetches the values."""

from __future__ import annotations

from server.pages.page import Page

_PAGE = Page("status")
HEADERS = _PAGE.headers
DOCUMENT = _PAGE.render()
