"""The status page of GET /, the same for every server: its script asks for the values."""

from __future__ import annotations

from server.pages.page import Page

_PAGE = Page("status")
HEADERS = _PAGE.headers
DOCUMENT = _PAGE.render()
