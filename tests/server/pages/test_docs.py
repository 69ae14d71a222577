"""GET /docs: Swagger UI from a Python package, with this server's policy and keys."""

from __future__ import annotations

import re

import httpx
import pytest

from server.pages.docs import DOCUMENT
from tests.server.conftest import running, tiny_config
from tests.server.pages.conftest import NARROW, WIDE

expect = pytest.importorskip("playwright.sync_api").expect

KEY, ADMIN = "sk-of-the-docs", "sk-of-the-admin"


@pytest.fixture(scope="module")
def guarded(tiny_model, tmp_path_factory):
    """A server that requires keys."""
    folder = tmp_path_factory.mktemp("keys")
    (folder / "api").write_text(KEY)
    (folder / "admin").write_text(ADMIN)
    files = {"api_key_file": str(folder / "api"), "admin_key_file": str(folder / "admin")}
    with running(tiny_config(tiny_model, **files)) as server:
        yield server


def operation(page, method, path):
    """Return an operation of the page, unfolded."""
    block = page.locator(f".opblock-{method}").filter(has=page.locator(f'[data-path="{path}"]'))
    block.locator(".opblock-summary-control").click()
    return block


def authorize(page, scheme, key):
    page.locator(".btn.authorize").click()
    form = page.locator(".auth-container").filter(has_text=re.compile(rf"^{scheme}\b"))
    form.locator("input").fill(key)
    form.get_by_role("button", name="Apply credentials").click()
    page.locator(".close-modal").click()


def test_the_page_allows_its_own_files_only_and_needs_no_key(guarded):
    response = httpx.get(guarded.url + "/docs")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/html")
    assert response.text == DOCUMENT and response.headers["cache-control"] == "no-store"
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy == {
        "default-src": "'none'", "style-src": "'self'", "script-src": "'self'", "connect-src": "'self'",
        "img-src": "data:", "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'",
    }  # fmt: skip
    for file in re.findall(r'(?:src|href)="(docs/[^"]+)"', DOCUMENT):
        found = httpx.get(f"{guarded.url}/{file}")
        assert found.status_code == 200 and found.headers["x-content-type-options"] == "nosniff", file
        assert found.headers["cache-control"] == "no-cache"
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', DOCUMENT)


@pytest.mark.parametrize("path", ["/docs/", "/docs/missing.js", "/docs/%2e%2e/__init__.py", "/docs/%2e%2e%2fcore.py"])
def test_nothing_else_of_the_package_is_served(server, path):
    assert httpx.get(server.url + path).status_code == 404


def test_the_page_loads_from_this_server_only_and_shows_every_route(open_page, server):
    page = open_page("about:blank")
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(server.url + "/docs")
    page.locator(".opblock").first.wait_for()
    paths = server.http.get("/openapi.json").json()["paths"]
    assert page.locator(".opblock").count() == sum(map(len, paths.values()))
    assert {url for url in asked if not url.startswith((server.url, "data:"))} == set()


def test_a_request_is_sent_with_the_key_of_the_page(open_page, guarded):
    page = open_page(guarded.url + "/docs")
    block = operation(page, "post", "/v1/chat/completions")
    expect(block.locator(".body-param__text")).to_have_value(re.compile("messages"))  # an example that can be sent
    with page.expect_response("**/v1/chat/completions") as refused:
        block.locator(".execute").click()
    assert refused.value.status == 401
    authorize(page, "key", KEY)
    with page.expect_response("**/v1/chat/completions") as answered:
        block.locator(".execute").click()
    assert answered.value.status == 200 and answered.value.request.headers["authorization"] == f"Bearer {KEY}"
    assert page.evaluate("() => [{ ...localStorage }, { ...sessionStorage }, document.cookie]") == [{}, {}, ""]


def test_an_admin_route_takes_the_admin_key(open_page, guarded):
    page = open_page(guarded.url + "/docs")
    authorize(page, "key", KEY)
    authorize(page, "admin_key", ADMIN)
    block = operation(page, "post", "/graphs/invalidate")
    with page.expect_response("**/graphs/invalidate") as answered:
        block.locator(".execute").click()
    assert answered.value.status == 200


@pytest.mark.parametrize("viewport", [WIDE, NARROW])
def test_the_page_fits_its_window(open_page, server, viewport):
    page = open_page(server.url + "/docs", viewport=viewport)
    operation(page, "get", "/v1/models")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_page_works_below_a_prefix(open_page, start_server):
    """The server removes --root-path itself, so a proxy may keep it or not."""
    server = start_server(root_path="/llm")
    page = open_page(server.url + "/llm/docs")
    block = operation(page, "get", "/v1/models")
    with page.expect_response("**/llm/v1/models") as answered:
        block.locator(".execute").click()
    assert answered.value.status == 200
