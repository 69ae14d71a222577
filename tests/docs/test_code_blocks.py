"""Every Python and shell block of README and docs runs as written, or carries a comment that says why it can't.

A block without a test has `<!-- not run: REASON -->` on the line above its fence. Blocks run against a server with the
tests' tiny model: its address replaces port 8000, and the tiny model replaces the default one.
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.server.conftest import RunningServer, running, tiny_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "deploy/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TESTED_ELSEWHERE = {"docs/adding-a-model.md": "tests/docs/test_adding_a_model.py"}
FENCE = re.compile(r"^(?P<above>[^\n]*)\n(?:\n)?```(?P<language>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: \S.* -->")
OTHER_LANGUAGES = {"text", "yaml", "json", "toml"}
COLUMNS = 88  # of code that a page of the site shows without scrolling, at 1,280 pixels
DEFAULT_MODEL = "smollm2-135m-instruct"


class Block(NamedTuple):
    page: str
    line: int
    language: str
    text: str
    not_run: bool

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text("utf-8")
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start("text"))
            not_run = NOT_RUN.fullmatch(match["above"]) is not None
            found.append(Block(str(page.relative_to(ROOT)), line, match["language"], match["text"], not_run))
    return found


BLOCKS = blocks()
RUN = [
    one for one in BLOCKS if one.language in ("python", "sh") and not one.not_run and one.page not in TESTED_ELSEWHERE
]


@pytest.fixture(scope="module")
def live(tiny_model: Path) -> Iterator[RunningServer]:
    config = tiny_config(
        tiny_model, served_model_name=(DEFAULT_MODEL,), max_model_len=1024, admin_without_key="loopback"
    )
    with running(config) as handle:
        handle.http.post("/v1/completions", json={"prompt": "red bird", "max_tokens": 8})  # something to tune for
        yield handle


def adapted(text: str, live: RunningServer, tiny_model: Path) -> str:
    """Return the block for this test's server and model."""
    address = live.url.removeprefix("http://")
    text = re.sub(r"(?:localhost|127\.0\.0\.1):8000", address, text)
    text = re.sub(r"\./my-model(?![-\w])", str(tiny_model), text)
    text = text.replace(".venv/bin/encore", "encore").replace(f'model="{DEFAULT_MODEL}"', f'model="{tiny_model}"')
    # A command with --url names a model that the server serves.
    return re.sub(rf"(encore run ){DEFAULT_MODEL}(?!.*--url)", rf"\g<1>{tiny_model}", text)


def test_every_fence_names_its_language() -> None:
    known = OTHER_LANGUAGES | {"python", "sh"}
    assert [one.name for one in BLOCKS if one.language not in known and not one.language.startswith("{")] == []
    assert sum(page.read_text("utf-8").count("\n```") for page in PAGES) == 2 * len(BLOCKS)


def test_no_line_is_wider_than_a_page_of_the_site() -> None:
    wide = [f"{one.name}: {line}" for one in BLOCKS for line in one.text.splitlines() if len(line) > COLUMNS]
    assert wide == []


@pytest.mark.parametrize("block", [one for one in RUN if one.language == "python"], ids=lambda one: one.name)
def test_a_python_block_runs(
    block: Block, live: RunningServer, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # a short example leaves its client open
        exec(compile(adapted(block.text, live, tiny_model), block.name, "exec"), {"__name__": "__main__"})
        gc.collect()  # or a later test would get the warning


@pytest.mark.parametrize("block", [one for one in RUN if one.language == "sh"], ids=lambda one: one.name)
def test_a_shell_block_runs(block: Block, live: RunningServer, tiny_model: Path, tmp_path: Path) -> None:
    encore = tmp_path / "encore"
    defaults = f'case "$1" in graphs) set -- "$@" --url {live.url};; generate) set -- "$@" --model {tiny_model};; esac'
    encore.write_text(f'#!/bin/sh\n{defaults}\nexec {sys.executable} -m server.cli "$@"\n')
    encore.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "ENCORE_CACHE": ""}
    script = adapted(block.text, live, tiny_model)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=600, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    assert '"error"' not in done.stdout
