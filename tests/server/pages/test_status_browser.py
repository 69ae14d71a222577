"""The status page in a real browser: values, progress of the captures, and what is told when the server is away."""

from __future__ import annotations

import pytest

from tests.server.conftest import running, tiny_config
from tests.server.pages.conftest import NARROW, WIDE

expect = pytest.importorskip("playwright.sync_api").expect
AS_JSON = {"Accept": "application/json"}


def with_body(page, url, body):
    """Let the page's own requests get `body`."""
    page.route(
        url + "/",
        lambda route: route.fulfill(json=body) if not route.request.is_navigation_request() else route.continue_(),
    )


def test_the_page_shows_how_far_the_captures_are(open_page, server):
    body = server.http.get("/", headers=AS_JSON).json()
    body["warm"] = {"mode": "background", "captured": 12, "pending": 33, "ratio": 0.3}
    page = open_page("about:blank")
    with_body(page, server.url, body)
    page.goto(server.url + "/")
    expect(page.locator("#warm-title")).to_have_text("12 of 45 graphs captured")
    share = page.locator("#warm-bar").evaluate("bar => bar.offsetWidth / bar.parentNode.offsetWidth")
    assert share == pytest.approx(12 / 45, abs=0.02)
    body["warm"] |= {"captured": 45, "pending": 0}
    expect(page.locator("#warm")).to_be_hidden()


def test_graphs_that_are_captured_on_first_use_are_no_progress(open_page, server):
    assert server.http.get("/ready").json()["warm"]["mode"] == "lazy"
    page = open_page(server.url + "/")
    expect(page.locator("#state")).to_have_text("ready")
    expect(page.locator("#warm")).to_be_hidden()


def test_a_start_is_no_alarm_and_a_lost_server_is(open_page, tiny_model):
    with running(tiny_config(tiny_model)) as server:
        body = server.http.get("/", headers=AS_JSON).json()
        body |= {"state": "loading", "reasons": ["the model is loading"], "warm": {}}
        page = open_page("about:blank")
        with_body(page, server.url, body)
        page.goto(server.url + "/")
        expect(page.locator("#banner")).to_have_text("the model is loading")
        expect(page.locator("#banner")).to_have_class("waiting")
        page.unroute(server.url + "/")
    expect(page.locator("#banner")).to_contain_text("can't be asked")
    expect(page.locator("#banner")).not_to_have_class("waiting")


@pytest.mark.parametrize("viewport", [WIDE, NARROW, {"width": 320, "height": 700}])
def test_the_page_fits_its_window_and_leads_to_the_others(open_page, server, viewport):
    page = open_page(server.url + "/", viewport=viewport)
    expect(page.locator("#model")).to_have_text("tiny")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for name, path in (("Chat", "/chat"), ("Graphs", "/graphs"), ("API", "/docs"), ("Status", "/")):
        page.get_by_label("Pages").get_by_role("link", name=name).click()
        page.wait_for_url(server.url + path)
        expect(page.locator("[aria-current=page]").first).to_have_text(name)
