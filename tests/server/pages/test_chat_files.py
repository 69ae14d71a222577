"""The chat page's files: headers, and that they load nothing from elsewhere and fit together."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

import server.pages
from server.pages.chat import DOCUMENT

FOLDER = Path(server.pages.__file__).parent / "static/chat"
FILES = {path.name: path.read_text("utf-8") for path in sorted(FOLDER.iterdir())}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}


def test_the_page_allows_its_own_files_only(server):
    response = server.http.get("/chat")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/html")
    assert response.text == DOCUMENT
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy == {
        "default-src": "'none'", "style-src": "'self'", "script-src": "'self'", "connect-src": "'self'",
        "img-src": "data:", "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'", "trusted-types": "'none'",
    }  # fmt: skip
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_not_sniffed_and_is_asked_for_again(server, name):
    response = server.http.get(f"/chat/{name}")
    assert response.text == FILES[name]
    assert response.headers["content-type"].split(";")[0] in ("text/javascript", "application/javascript", "text/css")
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-cache"
    again = server.http.get(f"/chat/{name}", headers={"If-None-Match": response.headers["etag"]})
    assert again.status_code == 304 and again.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/chat/", "/chat/missing.js", "/chat/%2e%2e/chat.html", "/chat/%2e%2e%2fpage.py"])
def test_nothing_else_is_served(server, path):
    response = httpx.get(server.url + path)
    assert response.status_code == 404 and response.json()["error"]["code"] == "route_not_found"


def test_the_files_load_nothing_from_elsewhere_and_write_text_only():
    for text in (DOCUMENT, *FILES.values()):
        assert not re.search(r"https?://(?!www\.w3\.org)|['\"(]//", text.replace("http%3A//www.w3.org", ""))
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?! type=\"module\" src=)", DOCUMENT)


def test_imports_and_ids_exist():
    for name, text in SCRIPTS.items():
        for other in re.findall(r'from "\./([\w.]+)"', text):
            assert other in SCRIPTS, f"{name} imports {other}"
    used = {found for text in SCRIPTS.values() for found in re.findall(r'byId\("([\w-]+)"\)', text)}
    assert used <= set(re.findall(r'\sid="([\w-]+)"', DOCUMENT))


def test_each_field_has_a_label():
    named = set(re.findall(r'<label for="([\w-]+)"', DOCUMENT))
    for tag in re.findall(r"<(?:input|select|textarea)[^>]*>", DOCUMENT):
        [identifier] = re.findall(r'\sid="([\w-]+)"', tag)
        assert identifier in named or "aria-label=" in tag or " hidden" in tag, tag


def test_the_page_and_its_files_need_no_key(start_server, tmp_path):
    (tmp_path / "keys").write_text("sk-secret")
    server = start_server(api_key_file=str(tmp_path / "keys"), wait_ready=False)
    assert server.http.get("/chat").status_code == server.http.get("/chat/main.js").status_code == 200
    assert server.http.get("/v1/models").status_code == 401


def test_the_status_page_links_to_the_chat(server):
    assert '<a href="chat">' in server.http.get("/", headers={"Accept": "text/html"}).text
