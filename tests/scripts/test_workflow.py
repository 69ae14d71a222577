""".github/workflows/tests.yml names versions that the project supports, and commands that it has."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
FILE = ROOT / ".github/workflows/tests.yml"


@pytest.fixture
def job() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text("utf-8"))["jobs"]["check"]


def test_the_versions_are_the_ends_of_the_supported_range(job):
    versions = job["strategy"]["matrix"]["include"]
    assert all(SpecifierSet(PROJECT["requires-python"]).contains(one["python"]) for one in versions)
    [torch] = [one for one in map(Requirement, PROJECT["dependencies"]) if one.name == "torch"]
    [oldest] = [one.version for one in torch.specifier if one.operator == ">="]
    newest = re.search(r"torch==([\d.]+)", (ROOT / "scripts/setup").read_text("utf-8"))[1]
    assert {one["torch"] for one in versions} == {newest, f"{oldest}.0"}


def test_the_checks_are_those_of_ci_and_torch_is_chosen_before(job):
    commands = [shlex.split(step["run"]) for step in job["steps"] if "run" in step]
    assert all((ROOT / command[0]).is_file() for command in commands if not command[0].startswith(".venv/"))
    order = [command[0] for command in commands]
    assert order.index("scripts/setup") < order.index(".venv/bin/python") < order.index(".ci/run")


def test_the_file_says_that_it_was_not_run():
    assert "Not run yet" in FILE.read_text("utf-8").partition("\nname:")[0]
