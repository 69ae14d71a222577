"""Headers of both pages: a browser may run the page's own style and script and nothing else."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest

PATHS = ("/", "/graphs")
BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.mark.parametrize("path", PATHS)
def test_a_browser_gets_a_page_and_a_policy_that_allows_only_its_own_style_and_script(server, path):
    response = server.http.get(path, headers=BROWSER)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/html")
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    for tag in ("style", "script"):
        [text] = re.findall(rf"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy.pop(f"{tag}-src") == f"'sha256-{digest}'"
    assert policy == {
        "default-src": "'none'", "connect-src": "'self'", "img-src": "data:",
        "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'",
    }  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_a_page_contains_nothing_that_its_policy_refuses(server, path):
    shown = server.http.get(path, headers=BROWSER).text
    markup = re.sub(r"<(style|script)>.*?</\1>", "", shown, flags=re.DOTALL)
    assert not re.findall(r"\s(?:on\w+|style)\s*=|javascript:|<(?:style|script|link rel=\"stylesheet)\b", markup)
    assert re.findall(r'(?:src|href)="([^"/#]*):', markup) == ["data"], "only the icon has an absolute URL"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("accept", ["text/html", "application/json"])
def test_pages_and_their_values_are_neither_cached_nor_sniffed(server, path, accept):
    response = server.http.get(path, headers={"Accept": accept})
    assert response.headers["content-type"].startswith(accept)
    assert response.headers["vary"] == "Accept" and response.headers["cache-control"] == "no-store"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
