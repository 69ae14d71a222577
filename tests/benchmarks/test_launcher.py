"""`python -m benchmarks` and the modules that it lists."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys

import pytest

from benchmarks.__main__ import ROOT, catalog, main

NAMES = [one.name for one in catalog()]


def test_the_list_has_a_line_for_every_benchmark(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    for one in catalog():
        [line] = [line for line in lines if line.split()[:1] == [one.name]]
        assert one.needs in line and one.summary in line


def test_every_module_with_a_main_is_listed_with_its_needs_and_a_summary():
    modules = {
        f"{path.parent.name}.{path.stem}"
        for path in ROOT.glob("*/*.py")
        if path.parent.name != "plots"
        if any(
            getattr(node, "name", "") == "main" and node.args.args[0].arg == "argv"
            for node in ast.parse(path.read_text()).body
        )
    }
    assert modules == set(NAMES)
    for one in catalog():
        assert one.needs in ("CPU", "CPU or 1 GPU", "1 GPU", "2 GPUs")
        assert one.summary.endswith(".")


def test_the_readme_lists_every_benchmark_with_its_needs():
    rows = [line.split("|")[1:3] for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| `")]
    found = {name.strip(" `"): needs.strip() for name, needs in rows if "." in name}
    assert found == {one.name: one.needs for one in catalog()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Megatron-Core imports parts of PyTorch that are deprecated
@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_shows_its_help_without_a_gpu(name, capsys):
    with pytest.raises(SystemExit) as status:
        main([name, "--help"])
    assert status.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: python -m benchmarks.{name}" in shown and "--json FILE" in shown
    assert importlib.import_module(f"benchmarks.{name}").__doc__.splitlines()[0] in shown


def test_a_module_can_be_run_by_itself():
    commands = (["benchmarks", "serving.http_streams"], ["benchmarks.serving.http_streams"])
    shown = [
        subprocess.run([sys.executable, "-m", *command, "--help"], capture_output=True, text=True, check=True).stdout
        for command in commands
    ]
    assert shown[0] == shown[1] != ""


def test_an_unknown_name_gets_the_nearest_ones(capsys):
    assert main(["kernels.attention_decod"]) == 2
    assert "did you mean kernels.attention_decode" in capsys.readouterr().err


def test_wrong_arguments_name_the_option(capsys):
    with pytest.raises(SystemExit) as status:
        main(["serving.offline", "--phases", "decode,prefil"])
    assert status.value.code == 2
    assert "argument --phases: 'prefil' is unknown" in capsys.readouterr().err
