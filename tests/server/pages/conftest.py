"""A real browser for the tests of pages. Playwright drives an installed Chromium or Chrome."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Chromium as root in a container, without the services that it would call.
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync")  # fmt: skip
MILLISECONDS = 60_000  # limit of each wait: a test passes as soon as its condition holds
WIDE = {"width": 1280, "height": 800}
NARROW = {"width": 375, "height": 700}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless browser; skips the test if none is installed."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: scripts/setup test installs it")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"needs a browser: none of {', '.join(BROWSERS)} is installed")
    playwright.expect.set_options(timeout=MILLISECONDS)
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=path, args=list(FLAGS))
        yield running
        running.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Return a function that opens a URL in a fresh profile. Afterwards no script may have failed or been refused."""
    contexts, problems = [], []

    def open_url(url: str, viewport: dict[str, int] = WIDE, **options: Any) -> Any:
        context = browser.new_context(viewport=viewport, **options)
        context.set_default_timeout(MILLISECONDS)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if _is_problem(message) else None)
        page.goto(url)
        return page

    yield open_url
    for context in contexts:
        context.close()
    assert not problems


def _is_problem(message: Any) -> bool:
    """Whether a console message is an error. The browser logs each response of 400 and above, which pages handle."""
    return message.type == "error" and not message.text.startswith("Failed to load resource")
