"""scripts/test_gpu records outcomes per file, and scripts/gpu_tests makes a table of them."""

from __future__ import annotations

import json
import shutil
import sys
import time
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = {"date": "2026-11-27T20:15:00+00:00", "commit": "2f0a545", "card": "1 × H200", "torch": "2.11.0"}
OLDER = RUN | {"date": "2026-11-26T08:00:00+00:00", "commit": "cac95a8 with changes", "card": "2 × H100"}
LINES = [
    OLDER | {"file": "tests/contract/test_threads.py", "outcome": {"passed": 9}},
    RUN | {"file": "tests/engine/kernels/test_moe.py", "outcome": {"passed": 30, "skipped": 2}},
    RUN | {"file": "tests/engine/kernels/test_launch.py", "outcome": {"passed": 4, "failed": 1}},
    RUN | {"file": "tests/engine/kernels/test_decode_step.py", "outcome": {}, "stopped": "exit status -11"},
    RUN
    | {"file": "tests/contract/test_threads.py", "outcome": {"passed": 7, "errors": 1}, "stopped": "out of its 9 s"},
]
TABLE = """\
| date | commit | cards | torch | files | outcome |
|---|---|---|---|---|---|
| 2026-11-27 | 2f0a545 | 1 × H200 | 2.11.0 | `tests/contract/test_threads.py` | 1 errors, 7 passed; test_threads.py: out of its 9 s |
| 2026-11-27 | 2f0a545 | 1 × H200 | 2.11.0 | 3 of `tests/engine/kernels` | 1 failed, 34 passed, 2 skipped; test_decode_step.py: exit status -11; test_launch.py: 1 failed |
| 2026-11-26 | cac95a8 with changes | 2 × H100 | 2.11.0 | `tests/contract/test_threads.py` | 9 passed |
"""  # noqa: E501


def script(name: str) -> ModuleType:
    loader = SourceFileLoader(f"{name}_script", str(ROOT / "scripts" / name))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


@pytest.fixture
def table() -> ModuleType:
    return script("gpu_tests")


def test_the_page_is_what_the_script_writes(table):
    text = table.PAGE.read_text("utf-8")
    earlier = text.partition(table.EARLIER)[2]
    assert text == table.page(table.read(table.LINES), earlier), "run: scripts/gpu_tests"
    assert earlier.count("\n| 2026-") > 70


def test_the_table_has_a_row_per_folder_of_a_run_and_names_what_failed(table, tmp_path, monkeypatch):
    monkeypatch.setattr(table, "LINES", tmp_path / "gpu-tests.jsonl")
    monkeypatch.setattr(table, "PAGE", tmp_path / "page.md")
    table.LINES.write_text("".join(json.dumps(line) + "\n" for line in LINES), "utf-8")
    table.PAGE.write_text("# Old title\n\n## Earlier runs\n\n| as | it | was |\n", "utf-8")
    for _ in range(2):  # the second time changes nothing
        table.main()
        assert table.PAGE.read_text("utf-8") == f"{table.INTRO}{TABLE}\n## Earlier runs\n\n| as | it | was |\n"


def test_a_page_without_the_heading_is_not_overwritten(table, tmp_path, monkeypatch):
    monkeypatch.setattr(table, "PAGE", tmp_path / "page.md")
    table.PAGE.write_text("| as | it | was |\n")
    with pytest.raises(ValueError, match="no heading '## Earlier runs'"):
        table.main()
    assert table.PAGE.read_text() == "| as | it | was |\n"


@pytest.mark.parametrize("line", ["{", "[]", "{}", json.dumps(RUN | {"file": "a.py", "outcome": "12 passed"})])
def test_a_damaged_line_is_named(table, tmp_path, line):
    (tmp_path / "lines.jsonl").write_text(json.dumps(LINES[0]) + f"\n{line}\n")
    with pytest.raises(ValueError, match=r"lines\.jsonl, line 2: not a line of scripts/test_gpu"):
        table.read(tmp_path / "lines.jsonl")


TESTS = {
    "test_mixed.py": """
        import pytest
        pytestmark = pytest.mark.gpu
        @pytest.mark.parametrize("name", ["a b", "c[1] FAILED"])
        def test_passes(name): pass
        def test_fails(): assert False
        @pytest.mark.skip(reason="why (not)")
        def test_skips(): pass
        @pytest.fixture
        def broken(): raise ValueError
        def test_error(broken): pass
        @pytest.mark.xfail
        def test_expected(): assert False
    """,
    "test_import.py": "import nothing_of_this_name  # mark.gpu",
    "test_none.py": "def test_cpu(): pass  # not mark.gpu",
    "test_slow.py": """
        import pytest, time
        pytestmark = pytest.mark.gpu
        def test_first(): pass
        def test_second(): time.sleep(3600)
    """,
    "test_dies.py": """
        import os, pytest
        pytestmark = pytest.mark.gpu
        def test_first(): pass
        def test_second(): os._exit(7)
    """,
}


@pytest.fixture
def runner(tmp_path, monkeypatch) -> ModuleType:
    """scripts/test_gpu over a folder of made-up tests."""
    module = script("test_gpu")
    for name, text in TESTS.items():
        (tmp_path / name).write_text("\n".join(line.removeprefix("        ") for line in text.splitlines()))
    options = [f"--rootdir={tmp_path}" if one.startswith("--rootdir") else one for one in module.PYTEST]
    monkeypatch.setattr(module, "PYTEST", [*options, "-p", "no:xdist", "-p", "no:hypothesispytest"])
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results.jsonl")
    return module


def records(runner: ModuleType, monkeypatch: pytest.MonkeyPatch, *names: str, seconds: str = "600") -> tuple[int, list]:
    results = runner.ROOT / "lines.jsonl"
    arguments = ["--seconds", seconds, "--logs", str(runner.ROOT / "logs"), "--results", str(results)]
    paths = [str(runner.ROOT / name) for name in names]
    monkeypatch.setattr(sys, "argv", ["test_gpu", *paths, *arguments, "--commit", "2f0a545"])
    status = runner.main()
    return status, [json.loads(line) for line in results.read_text("utf-8").splitlines()]


def test_a_run_appends_a_line_per_file(runner, table, monkeypatch, capsys):
    status, lines = records(runner, monkeypatch, "test_mixed.py", "test_none.py")
    assert status == 1
    assert [(line["file"], line["outcome"]) for line in lines] == [
        ("test_mixed.py", {"passed": 3, "failed": 1, "skipped": 1, "errors": 1}),
        ("test_none.py", {}),
    ]
    assert {line["commit"] for line in lines} == {"2f0a545"} and not any("stopped" in line for line in lines)
    assert "FAILED test_mixed.py::test_fails" in capsys.readouterr().out
    again = records(runner, monkeypatch, "test_none.py")
    assert again[0] == 0 and again[1][:2] == lines and len(again[1]) == 3
    assert table.read(runner.ROOT / "lines.jsonl") == again[1]  # the other script takes them


def test_a_file_that_cannot_be_imported_is_an_error(runner, monkeypatch):
    status, lines = records(runner, monkeypatch, "test_import.py")
    assert status == 1 and [(line["outcome"], line["stopped"]) for line in lines] == [({"errors": 1}, "exit status 2")]


@pytest.mark.parametrize("name", ["test_slow.py", "test_dies.py"])
def test_what_ran_before_a_process_ended_is_recorded(runner, monkeypatch, name):
    started = time.monotonic()
    records(runner, monkeypatch, "test_none.py")
    seconds = 2 + 3 * (time.monotonic() - started)  # a busy machine takes long to begin the first test
    status, lines = records(runner, monkeypatch, name, seconds=str(seconds))
    stopped = f"out of its {seconds:g} s" if name == "test_slow.py" else "exit status 7"
    found = [(line["outcome"], line["stopped"]) for line in lines if line["file"] == name]
    assert status == 1 and found == [({"passed": 1}, stopped)]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_says_whether_files_have_changed(runner, monkeypatch):
    assert runner.commit() == "unknown"
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    for command in (("init", "-q"), ("add", "."), (*identity, "commit", "-qm", "first")):
        runner.output_of("git", *command)
    head = runner.commit()
    assert len(head) >= 7 and "changes" not in head
    runner.RESULTS.write_text("the results are no change")
    assert runner.commit() == head
    (runner.ROOT / "test_none.py").write_text("")
    assert runner.commit() == f"{head} with changes"
