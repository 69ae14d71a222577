"""The chat page of GET /chat. Its modules and style are under /chat/."""

from __future__ import annotations

from server.pages.assets import policy_headers
from server.pages.page import render

# Trusted Types refuse to turn text into markup.
HEADERS = policy_headers("require-trusted-types-for 'script'", "trusted-types 'none'")
DOCUMENT = render("chat.html")
