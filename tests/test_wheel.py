"""The wheel: every module and every file of the pages is in it, and nothing else of the repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

from server.pages import status

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("server", "engine", "graph_cache")
OTHERS = ("tests", "benchmarks", "examples")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of a copy of the sources: a build in the repository would leave files there, and find older ones."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for file in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / file, tree)
    for folder in PACKAGES + OTHERS:
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    command = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index")
    built = subprocess.run([*command, "--wheel-dir", out, tree], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    [found] = out.glob("*.whl")
    return found


def test_it_holds_all_modules_and_static_files_and_nothing_else(wheel):
    modules = {path for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    static = {path for path in (ROOT / "server/pages/static").rglob("*") if path.is_file()}
    assert {path.suffix for path in static} == {".html", ".css", ".js", ".svg"}
    static.add(ROOT / "engine/kernels/cpu_kernels.cpp")
    names = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == {path.relative_to(ROOT).as_posix() for path in modules | static}


def test_it_holds_the_license_and_names_it(wheel):
    archive = ZipFile(wheel)
    [license_file] = [name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
    assert archive.read(license_file) == (ROOT / "LICENSE").read_bytes()
    [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    headers = Parser().parsestr(archive.read(metadata).decode())
    assert (headers["License-Expression"], headers.get_all("License-File")) == ("Apache-2.0", ["LICENSE"])


def test_the_pages_are_read_from_the_wheel(wheel, tmp_path):
    code = "import server.pages.graphs, server.pages.status as page; print(page.__file__); print(page.DOCUMENT, end='')"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(wheel), "PYTHONUTF8": "1"},
        capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    place, _, document = run.stdout.partition("\n")
    assert place.startswith(str(wheel)) and document == status.DOCUMENT


def test_the_installed_command_shows_the_version_of_pyproject(wheel, tmp_path):
    install = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", tmp_path)
    subprocess.run([*install, wheel], check=True)
    shown = subprocess.run(
        [sys.executable, tmp_path / "bin/encore", "--version"], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True,
    )  # fmt: skip
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert (shown.returncode, shown.stdout) == (0, f"encore {version}\n"), shown.stderr
