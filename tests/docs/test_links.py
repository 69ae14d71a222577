"""Links and names of files lead to files that exist. Sphinx checks the links between pages of the site."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "deploy/README.md", "benchmarks/README.md", "benchmarks/results/README.md"]
NAMED = re.compile(r"`((?:[\w-]+/)+[\w-]*(?:\.(?:py|md|json|svg|yaml|yml|service|toml|txt))?)`")
NOT_FILES = {"GROUP/NAME.py", "openai/", "hosted_vllm/", "application/json"}
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_to_files(page: str) -> None:
    links = LINK.findall((ROOT / page).read_text("utf-8"))
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


@pytest.mark.parametrize("page", [*PAGES, *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))])
def test_files_that_are_named_exist(page: str) -> None:
    names = NAMED.findall((ROOT / page).read_text("utf-8"))
    roots = [ROOT, (ROOT / page).parent, *(ROOT / package for package in ("engine", "server", "graph_cache"))]
    missing = [name for name in names if not any((root / name).exists() for root in roots)]
    assert set(missing) <= NOT_FILES


def test_links_are_found() -> None:
    assert len(LINK.findall((ROOT / "README.md").read_text("utf-8"))) > 15
