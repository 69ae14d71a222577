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


def text(shown):
    return " ".join(re.sub(r"<[^>]+>", " ", shown[shown.index("<body") :]).split())


def test_numbers_of_a_row_and_totals():
    rows = ROW, ROW | {"bucket": 16, "state": "not_captured", "replays": 0, "padded_rows": 0, "bytes": 0}
    shown = page(*rows, warm={"mode": "background", "pending": 1})
    for words in (
        "Graphs captured 1 of 2 warm-up: background, 1 to go",
        "Replays 100 of 1 of these graphs",
        "Padding in replays 25.0 % 200 of 800 rows",
        "Memory pool 3.0 MiB",
        "decode scope block · phase decode · tape 1 of 2 captured · 100 replays · 25.0% padding 1 unused",
        "8 captured 100 25.0% 5.0 MiB 0.125 s 0123456789abcdef",
        "16 not captured 0 – 0 B",
    ):
        assert words in text(shown)
    assert '<rect width="25"' in shown and '<rect width="50"' in shown


def test_sites_have_a_table_each_and_variants_are_named():
    shown = page(ROW | {"statics": {"context": 256}}, ROW | {"site": "sampling", "failure": "no memory", "replays": 0})
    assert shown.count("<table") == 2 and "context=256" in shown and shown.count("Captured for") == 1
    assert "1 failed" in text(shown) and "no memory" in text(shown) and "unused</summary>" not in shown


def test_every_value_is_escaped():
    evil = "<img src=x onerror=alert(1)>\"'&"
    row = {key: evil if isinstance(value, str) else value for key, value in ROW.items()}
    shown = page(row | {"failure": evil, "statics": {evil: evil}}, model=evil, warm={"mode": evil})
    assert "<img" not in shown


def test_the_page_is_self_contained_and_refreshes_itself():
    shown = page(ROW)
    assert not re.search(
        r"src\s*=|href\s*=(?!\"(?:data:|(?:chat|graphs|docs|\./)\"))|url\(|@import|['\"]//|https?://", shown
    )
    assert "setInterval" in shown and 'http-equiv="refresh"' in shown
    assert "prefers-color-scheme: dark" in shown and "width=device-width" in shown


def test_tags_close_in_order():
    class Checker(HTMLParser):
        stack: list[str] = []

        def handle_starttag(self, tag, attrs):
            if tag not in ("meta", "link", "rect"):
                self.stack.append(tag)

        def handle_endtag(self, tag):
            if tag != "rect":
                assert self.stack.pop() == tag

    for shown in (page(), page(ROW), page(ROW | {"failure": "no memory", "state": "failed", "statics": {"a": 1}})):
        checker = Checker()
        checker.feed(shown)
        assert checker.stack == []


def test_bytes_are_readable():
    assert [human_bytes(count) for count in (0, 1023, 1536, 300 * 2**20, 3 * 2**30)] == [
        "0 B", "1023 B", "1.5 KiB", "300 MiB", "3.0 GiB"
    ]  # fmt: skip
