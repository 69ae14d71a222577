"""The graph page in a real browser: nothing is cut, unused graphs are folded, colours are those of the status page."""

from __future__ import annotations

import pytest

from tests.server.conftest import running, tiny_config

expect = pytest.importorskip("playwright.sync_api").expect


@pytest.fixture(scope="module")
def replayed(tiny_model):
    """A server that replayed its graph with one row."""
    with running(tiny_config(tiny_model, graph_buckets=(1, 2), warmup="full")) as server:
        server.answer("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True})
        yield server


@pytest.fixture
def graphs(open_page, replayed):
    """Return a function that opens the page."""
    return lambda **options: open_page(replayed.url + "/graphs", **options)


@pytest.mark.parametrize(("width", "hidden"), [(1280, 0), (700, 5), (390, 5), (320, 5)])
def test_no_column_is_cut(graphs, width, hidden):
    shown = graphs(viewport={"width": width, "height": 800})
    shown.locator("summary").first.click()
    expect(shown.locator("table").first.locator("tr.unused").first).to_be_visible()
    assert (
        shown.evaluate("""() => [document.documentElement, ...document.querySelectorAll(".card, td, th")]
        .filter(node => node.scrollWidth > node.clientWidth + 1 && getComputedStyle(node).display !== "none")
        .map(node => node.textContent)""")
        == []
    )
    heads = shown.locator("table").first.locator("th")
    assert sum(not heads.nth(index).is_visible() for index in range(heads.count())) == hidden


def test_unused_graphs_are_folded_and_stay_unfolded_after_a_refresh(graphs):
    shown = graphs()
    table = shown.locator("table").first
    expect(table.locator("tbody tr:not(.unused)").first).to_be_visible()
    expect(table.locator("tr.unused").first).to_be_hidden()
    shown.locator("summary").first.click()
    with shown.expect_response("**/graphs"):
        pass
    expect(shown.locator("details").first).to_have_attribute("open", "")
    expect(table.locator("tr.unused").first).to_be_visible()


def test_padding_has_one_colour_on_all_pages(graphs):
    shown = graphs(color_scheme="dark")
    colour = "([selector, name]) => getComputedStyle(document.querySelector(selector))[name]"
    waste = shown.evaluate(colour, [".track.waste rect", "fill"])
    replay = shown.evaluate(colour, [".track:not(.waste) rect", "fill"])
    shown.goto(shown.url.removesuffix("graphs"))
    assert shown.evaluate(colour, ["#padding .track i", "backgroundColor"]) == waste
    assert shown.evaluate(colour, ["#hits .track i", "backgroundColor"]) == replay != waste
