"""The documentation site builds without a warning, loads nothing from other hosts, and fits a phone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.server.pages.conftest import NARROW, browser

__all__ = ["browser"]  # a fixture
ROOT = Path(__file__).resolve().parents[2]
EXTERNAL = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*(?:src|href)=["'](?:https?:)?//""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "--fail-on-warning", "--keep-going", "-b", "html", "-d"]
    done = subprocess.run([*command, str(folder / "cache"), "docs", str(folder / "html")], cwd=ROOT,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "html"


def test_every_page_of_docs_is_on_the_site(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    assert {path for path in pages if not (site / path).with_suffix(".html").is_file()} == set()


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    loading = {path.name: EXTERNAL.findall(path.read_text("utf-8")) for path in site.rglob("*.html")}
    assert {name: found for name, found in loading.items() if found} == {}


def test_reference_pages_hold_what_the_code_defines(site: Path) -> None:
    def text(page: str) -> str:
        return re.sub(r"<[^>]+>", "", (site / f"reference/{page}.html").read_text("utf-8"))

    assert "--max-num-seqs" in text("settings") and "--drain-seconds" in text("settings")
    assert "--request-rate X" in text("commands") and "--concurrency N" in text("commands")
    assert "--model TEXT" in text("commands") and "--help" not in text("commands")
    assert "--max-num-seqs" not in text("commands"), "settings have a page"
    assert "encore_graph_replays_total" in text("metrics") and "encore_time_to_first_token_seconds" in text("metrics")
    assert "POST /v1/chat/completions" in text("http") and "max_new_tokens" in text("http")
    assert "update_weights" in text("python") and "graphed" in text("python")
    assert "include_stop_str_in_output" in text("python") and "a stop token included" in text("python")
    assert "max_num_seqs: int | None = None" in text("python"), "a class of settings shows its fields"
    assert "no effect: " not in text("http") and "not supported: " not in text("http")


def test_the_site_opens_with_a_request_and_shows_no_benchmark(site: Path) -> None:
    opening = (site / "index.html").read_text("utf-8").partition("<article")[2]
    assert 0 < opening.index("curl") < opening.index("<img") and "overview" not in opening


def test_cells_of_wide_tables_name_their_column(site: Path) -> None:
    page = (site / "reference/http.html").read_text("utf-8")
    assert 'data-label="default"' in page and 'class="wide ' in page
    assert "data-label" not in (site / "quickstart.html").read_text("utf-8"), "a phone has room for two columns"


def test_long_names_in_tables_may_break(site: Path) -> None:
    assert "argument_<wbr>without_<wbr>memory" in (site / "refusals.html").read_text("utf-8")


CUT = """() => [...document.querySelectorAll("article :is(pre, table, .table-wrapper)")]
    .filter(node => node.scrollWidth > node.clientWidth + 2).map(node => node.textContent.slice(0, 80))"""


def test_a_phone_shows_tables_and_code_without_scrolling_sideways(site: Path, browser: Any) -> None:
    context = browser.new_context(viewport=NARROW)
    page = context.new_page()
    cut = {}
    for path in sorted(site.rglob("*.html")):
        page.goto(path.as_uri())
        cut[str(path)] = page.evaluate(CUT)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
    context.close()
    assert len(cut) > 20 and {path: nodes for path, nodes in cut.items() if nodes} == {}
