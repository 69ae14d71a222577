"""Relative links of Markdown pages outside of the site lead to files that exist; Sphinx checks those of the site."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "deploy/README.md", "benchmarks/README.md", "benchmarks/results/README.md"]
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_to_files(page: str) -> None:
    links = LINK.findall((ROOT / page).read_text("utf-8"))
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_links_are_found() -> None:
    assert len(LINK.findall((ROOT / "README.md").read_text("utf-8"))) > 15
