"""The script that runs vLLM's API tests: its table of expected failures, and what it reads and selects."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts" / "vllm_api"


@pytest.fixture(scope="module")
def run():
    spec = importlib.util.spec_from_file_location("vllm_api_run", SCRIPTS / "run.py")
    module = sys.modules["vllm_api_run"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["vllm_api_run"]


def test_each_expected_failure_has_a_kind_and_a_reason_and_is_listed_once(run):
    found = run.expectations()
    assert all(one.prefix.startswith(("entrypoints/", "tool_use/")) and one.reason for one in found)
    assert len({one.prefix for one in found}) == len(found)


@pytest.mark.parametrize("line", ["missing | entrypoints/a.py", "unknown | entrypoints/a.py | why", "entrypoints/a.py"])
def test_a_malformed_line_is_refused(run, tmp_path, line):
    (tmp_path / "expected.txt").write_text(f"# a comment\n\n{line}\n")
    with pytest.raises(ValueError, match=r"expected\.txt, line 3: KIND \| PREFIX \| REASON is needed"):
        run.expectations(tmp_path / "expected.txt")


def test_the_longest_prefix_explains_a_failure(run):
    file, one = run.Expected("entrypoints/a.py", "missing", "x"), run.Expected("entrypoints/a.py::test_b", "model", "y")
    failed = run.Outcome("entrypoints/a.py::test_b[1]", "failed", "")
    assert run.explained(failed, [one, file]) is one and run.explained(failed, [file]) is file
    assert run.explained(run.Outcome("entrypoints/c.py::test_b", "failed", ""), [file, one]) is None


def test_a_selection_names_files_folders_and_tests(run, tmp_path):
    for name in ("entrypoints/openai/test_b.py", "entrypoints/openai/responses/test_a.py", "tool_use/utils.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    below, above = "entrypoints/openai/responses/test_a.py", "entrypoints/openai/test_b.py"
    assert run.files_of(tmp_path, ["entrypoints/openai"]) == [above]
    assert run.files_of(tmp_path, ["entrypoints", "tool_use"]) == [below, above]
    assert run.files_of(tmp_path, [f"tests/{above}::test_x"]) == [f"{above}::test_x"]
    with pytest.raises(SystemExit, match="no entrypoints/none"):
        run.files_of(tmp_path, ["entrypoints/none"])


def test_errors_of_fixtures_count_as_failures(run):
    report = ElementTree.fromstring(
        '<s><testcase name="a"/><testcase name="b"><error message="x\n y"/></testcase>'
        '<testcase name="c"><failure message="z"/></testcase><testcase name="d"><skipped message="w"/></testcase></s>'
    )
    found = [run.outcome_of("f.py", case) for case in report]
    assert [(one.test, one.result, one.message) for one in found] == [
        ("f.py::a", "passed", ""), ("f.py::b", "failed", "x y"), ("f.py::c", "failed", "z"), ("f.py::d", "skipped", "w")
    ]  # fmt: skip
