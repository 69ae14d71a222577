"""The graph page: escaped, self-contained, with correct numbers."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from server.formatting import human_bytes
from server.pages.graphs import render_graphs_page

ROW = {
    "site": "decode", "scope": "block", "phase": "decode", "bucket": 8, "statics": {}, "state": "captured",
    "replays": 100, "padded_rows": 200, "bytes": 5 * 2**20, "capture_seconds": 0.125, "engine": "tape", "failure": None,
    "digest": "0123456789abcdef",
}  # fmt: skip


def page(*rows, **body):
    return render_graphs_page(
        {"model": "tiny", "warm": {"ratio": 0.5}, "pool_bytes": 3 * 2**20, "graphs": list(rows)} | body
    )


def test_numbers_of_a_row_and_totals():
    shown = page(ROW, ROW | {"bucket": 16, "state": "not_captured", "replays": 0, "padded_rows": 0, "bytes": 0})
    for text in (
        "25.0%",
        "<code>0123456789abcdef</code>",
        "5.0 MiB",
        "<dt>Memory pool</dt><dd>3.0 MiB</dd>",
        "0.125 s",
        "1 of 2",
        "not captured",
        "<dt>Warm</dt><dd>50.0%</dd>",
    ):
        assert text in shown
    assert '<rect width="25"' in shown


def test_every_value_is_escaped():
    evil = "<img src=x onerror=alert(1)>\"'&"
    row = {key: evil if isinstance(value, str) else value for key, value in ROW.items()}
    shown = page(row | {"failure": evil, "statics": {evil: evil}}, model=evil, warm={"mode": evil})
    assert "<img" not in shown


def test_the_page_is_self_contained_and_refreshes_itself():
    shown = page(ROW)
    assert not re.search(r"src\s*=|href\s*=(?!\"(?:data:|chat\"|\./\"))|url\(|@import|['\"]//|https?://", shown)
    assert "setInterval" in shown and 'http-equiv="refresh"' in shown
    assert "prefers-color-scheme: dark" in shown and "width=device-width" in shown


def test_tags_close_in_order():
    class Checker(HTMLParser):
        stack: list[str] = []

        def handle_starttag(self, tag, attrs):
            if tag not in ("meta", "link"):
                self.stack.append(tag)

        def handle_endtag(self, tag):
            assert self.stack.pop() == tag

    for shown in (page(), page(ROW), page(ROW | {"failure": "no memory", "state": "failed", "statics": {"a": 1}})):
        checker = Checker()
        checker.feed(shown)
        assert checker.stack == []


def test_bytes_are_readable():
    assert [human_bytes(count) for count in (0, 1023, 1536, 300 * 2**20, 3 * 2**30)] == [
        "0 B", "1023 B", "1.5 KiB", "300 MiB", "3.0 GiB"
    ]  # fmt: skip
