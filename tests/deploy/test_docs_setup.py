"""scripts/docs installs what the documentation needs, not what the tests need, and says where the site is."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.files import ROOT

# Stands for the environment's Python: it notes how it is called, and writes the page that sphinx would.
PYTHON = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in *sphinx*) mkdir -p site && touch site/index.html;; esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "clone with spaces"
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / ".venv/bin").mkdir(parents=True)
    for name in ("python", "encore"):
        (folder / ".venv/bin" / name).write_text(PYTHON)
        (folder / ".venv/bin" / name).chmod(0o755)
    return folder


def run(clone: Path, *words: str) -> tuple[str, str]:
    """Return the output of a script and the calls of Python that install something."""
    calls = clone / "calls"
    calls.write_text("")
    done = subprocess.run(words, cwd=clone, env=os.environ | {"CALLS": str(calls)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, "\n".join(line for line in calls.read_text().splitlines() if " -e " in line)


def test_docs_needs_no_test_packages_and_names_the_site(clone: Path) -> None:
    output, installs = run(clone, "scripts/docs", "site")
    assert installs.endswith("-e .[docs]")
    assert output.splitlines()[-1] == f"docs: the site is at file://{clone}/site/index.html"


@pytest.mark.parametrize(
    ("done", "wanted", "installs"),
    [("docs", "docs", False), ("docs", "serve", False), ("test", "docs", False), ("docs", "test", True),
     ("serve", "docs", True)],
)  # fmt: skip
def test_a_purpose_that_another_one_includes_installs_nothing(
    clone: Path, done: str, wanted: str, installs: bool
) -> None:
    run(clone, "scripts/setup", done)
    assert bool(run(clone, "scripts/setup", wanted)[1]) == installs
