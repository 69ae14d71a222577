"""The Dockerfile's steps parse, copy existing files, and agree with the rest of the repository."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.deploy.files import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def check(file: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(ROOT / "scripts/check_dockerfile"), "--parse-only", "--file", str(file)]
    return subprocess.run(words, capture_output=True, text=True)


def test_every_step_parses_and_finds_what_it_copies() -> None:
    done = check(ROOT / "Dockerfile")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("shipped", "broken", "complaint"),
    [
        ("COPY engine engine", "COPY engines engines", "COPY finds no engines in the build context"),
        ("COPY engine engine", "COPY tests tests", "COPY finds no tests in the build context"),
        ("COPY --from=wheel", "COPY --from=wheels", "there is no stage 'wheels' before this line"),
        ("RUN python3 -m venv /opt/encore", "RUN (python3 -m venv /opt/encore", "RUN is no valid shell"),
        ("EXPOSE 8000", "EXPOSED 8000", "'EXPOSED' is no instruction"),
        ('ENTRYPOINT ["encore", "serve"]', 'ENTRYPOINT ["encore", serve]', "ENTRYPOINT is not a JSON list"),
    ],
)
def test_an_invalid_step_is_found(shipped, broken, complaint, tmp_path) -> None:
    assert DOCKERFILE.count(shipped) == 1
    file = tmp_path / "Dockerfile"
    file.write_text(DOCKERFILE.replace(shipped, broken), encoding="utf-8")
    done = check(file)
    assert done.returncode == 1 and complaint in done.stderr


def test_every_package_is_copied_after_the_dependencies_are_installed() -> None:
    packages = [pattern.rstrip("*") for pattern in PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]]
    dependencies = DOCKERFILE.rindex("--require-hashes")
    for package in packages:
        assert DOCKERFILE.index(f"COPY {package} {package}") > dependencies


def test_nothing_is_installed_without_a_hash() -> None:
    words = [line for line in DOCKERFILE.splitlines() if re.search(r"\bpip (install|wheel|download)\b", line)]
    assert len(words) == 4
    for line in words:
        locked = "--require-hashes" in line and re.search(r"-r \S*requirements/\S+\.txt", line)
        built = "--no-deps" in line and ("--no-index" in line or "--no-build-isolation" in line)
        assert locked or built, line


def test_the_image_does_not_serve_the_public_without_keys() -> None:
    assert "ENCORE_HOST=0.0.0.0" in DOCKERFILE  # so the server requires keys or the flag
    assert "ENCORE_ALLOW_UNAUTHENTICATED" not in DOCKERFILE
    command = re.search(r"docker run (.*\n#.*)encore$", DOCKERFILE, re.MULTILINE)[0]
    assert "ENCORE_API_KEYS=" in command and "-p 127.0.0.1:" in command


def test_the_image_runs_the_command_as_an_ordinary_user_with_a_health_check_of_readiness() -> None:
    final = DOCKERFILE[DOCKERFILE.rindex("\nFROM ") :]
    assert re.findall(r"^USER (.*)$", final, re.MULTILINE) == [
        "10001:10001"
    ]  # a number: Kubernetes can't look up a name
    assert 'ENTRYPOINT ["encore", "serve"]' in final and "encore" in PYPROJECT["project"]["scripts"]
    assert re.search(r"^HEALTHCHECK .*\n.*/ready", final, re.MULTILINE)


def test_the_base_is_a_build_argument_before_the_first_stage() -> None:
    assert re.search(r"^ARG BASE=\S+\n+FROM \$\{BASE\} AS base$", DOCKERFILE, re.MULTILINE)
