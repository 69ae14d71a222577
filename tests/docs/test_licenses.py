"""LICENSE is the unmodified Apache License 2.0, and docs/licenses.md lists what Encore needs and ships."""

from __future__ import annotations

import hashlib
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from engine.checkpoint.default_model import SMOLLM2

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PAGE = (ROOT / "docs/licenses.md").read_text("utf-8")
APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"  # of apache.org/licenses/LICENSE-2.0.txt
BINARY = {".gguf", ".ico", ".jpg", ".otf", ".png", ".safetensors", ".ttf", ".whl", ".woff", ".woff2"}


def test_the_license_is_unmodified_and_named_where_people_look() -> None:
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_2
    assert PROJECT["license"] == "Apache-2.0"
    assert "[Apache-2.0](LICENSE)" in (ROOT / "README.md").read_text("utf-8")
    final = (ROOT / "Dockerfile").read_text("utf-8").rpartition("\nFROM ")[2]
    assert 'org.opencontainers.image.licenses="Apache-2.0"' in final


@pytest.mark.parametrize("text", [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["gpu"]])
def test_the_license_of_every_package_that_users_install_is_listed(text: str) -> None:
    assert re.search(rf"^\| {Requirement(text).name}\b", PAGE, re.MULTILINE)


def test_the_license_of_the_default_model_is_listed() -> None:
    package, version = SMOLLM2.requirement.split("==")
    model = re.escape(SMOLLM2.gguf.partition(".")[0])
    row = rf"^\| {model}, the default \| Apache-2\.0 \| .*`{package}` {re.escape(version)} \(Apache-2\.0\)"
    assert re.search(row, PAGE, re.MULTILINE)


def test_the_repository_ships_no_fonts_images_or_weights_that_the_page_would_have_to_list() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [name for name in listed.stdout.splitlines() if Path(name).suffix in BINARY] == []
