"""requirements/*.txt lock every dependency with its hashes; images are named by digest."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.files import DEPLOY, ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LOCKS = {name: (ROOT / f"requirements/{name}.txt").read_text(encoding="utf-8") for name in ("cpu", "cuda")}
IMAGE_FILES = [ROOT / "Dockerfile", *sorted(DEPLOY.glob("compose*.yaml"))]


def entries(lock: str) -> dict[str, tuple[Requirement, list[str]]]:
    """Return normalized name -> (requirement, hashes). A line that is neither fails the test."""
    lines = [line for line in LOCKS[lock].replace("\\\n", " ").splitlines() if not line.startswith("#")]
    found: dict[str, tuple[Requirement, list[str]]] = {}
    for line in lines:
        requirement = Requirement(re.sub(r"\s+--hash=\S+", "", line))
        name = canonicalize_name(requirement.name)
        assert name not in found, f"{name} is locked twice"
        found[name] = (requirement, re.findall(r"--hash=sha256:([0-9a-f]{64})(?=\s|$)", line))
    return found


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_has_one_version_and_hashes(lock: str) -> None:
    for name, (requirement, hashes) in entries(lock).items():
        assert [one.operator for one in requirement.specifier] == ["=="], name
        assert hashes and len(set(hashes)) == len(hashes), name


@pytest.mark.parametrize("lock", LOCKS)
def test_no_index_or_path_is_named(lock: str) -> None:
    assert not re.search(r"://|--(extra-)?index-url|--find-links|--trusted-host|^-", LOCKS[lock], re.MULTILINE)


@pytest.mark.parametrize("lock", LOCKS)
def test_the_requirements_of_the_project_and_its_build_are_locked_within_their_bounds(lock: str) -> None:
    locked = entries(lock)
    for text in PYPROJECT["project"]["dependencies"] + PYPROJECT["build-system"]["requires"]:
        wanted = Requirement(text)
        requirement, _ = locked[canonicalize_name(wanted.name)]
        (version,) = requirement.specifier
        assert wanted.specifier.contains(version.version), text


@pytest.mark.parametrize("lock", LOCKS)
def test_requirements_of_locked_packages_are_locked(lock: str) -> None:
    locked = entries(lock)
    for name in locked:
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # of another platform, or of CUDA
            continue
        for wanted in map(Requirement, requires):
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                assert canonicalize_name(wanted.name) in locked, f"{name} requires {wanted}"


def test_torch_is_the_version_that_is_tested() -> None:
    tested = set(re.findall(r"torch==([\d.]+)", (ROOT / "scripts/setup").read_text(encoding="utf-8")))
    (version,) = tested
    assert str(entries("cpu")["torch"][0].specifier) == f"=={version}+cpu"
    assert str(entries("cuda")["torch"][0].specifier) == f"=={version}"


def test_only_the_cuda_lock_has_libraries_of_cuda() -> None:
    def of_cuda(lock: str) -> set[str]:
        return {name for name in entries(lock) if name.startswith(("nvidia-", "cuda-", "triton"))}

    assert of_cuda("cpu") == set() and {"triton", "nvidia-nccl-cu13"} <= of_cuda("cuda")


def test_both_locks_agree_on_what_they_share() -> None:
    cpu, cuda = entries("cpu"), entries("cuda")
    for name in (cpu.keys() & cuda.keys()) - {"torch"}:
        assert (str(cpu[name][0]), cpu[name][1]) == (str(cuda[name][0]), cuda[name][1])


@pytest.mark.parametrize("file", IMAGE_FILES, ids=lambda file: file.name)
def test_images_are_named_by_digest(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    named = re.findall(r"^(?:ARG BASE=|# +with CUDA_BASE=| +image: | +BASE: )(\S+)$", text, re.MULTILINE)
    own = [name for name in named if name.startswith("encore:local")]
    assert len(named) > len(own)
    for name in set(named) - set(own):
        assert re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", name), name


def test_pin_images_writes_the_digests_that_the_registry_reports(tmp_path: Path) -> None:
    old, new = "0" * 64, "1" * 64
    docker = tmp_path / "docker"  # answers as `docker buildx imagetools inspect --format` does
    docker.write_text(f'#!/bin/sh\n[ "$4" != bad/image:1 ] || exit 1\necho sha256:{new}\n')
    docker.chmod(0o755)
    file = tmp_path / "file"
    script = [sys.executable, str(ROOT / "scripts/pin_images"), "--docker", str(docker)]
    file.write_text(f"ARG BASE=a/b:1@sha256:{old}\nother\n  image: c:2\n")
    done = subprocess.run([*script, str(file)], capture_output=True, text=True)
    assert done.returncode == 0 and file.read_text() == f"ARG BASE=a/b:1@sha256:{new}\nother\n  image: c:2\n"
    text = f"ARG BASE=bad/image:1@sha256:{old}\n"
    file.write_text(text)
    done = subprocess.run([*script, str(file)], capture_output=True, text=True)
    assert done.returncode == 1 and "bad/image:1" in done.stderr and file.read_text() == text
