"""scripts/setup chooses where torch comes from, says what it downloads, and leaves pip's progress visible.

A stand-in for Python records pip's arguments; the probe of PyTorch's index runs against local servers.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYTHON = f"""#!/bin/sh
case "$1 $2" in
"-m venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python; : >.venv/bin/encore; chmod +x .venv/bin/encore ;;
"-m pip") echo "$*" >>pip.log; echo "Downloading a.whl (190.0 MB)"; exit "${{PIP_STATUS:-0}}" ;;
*) exec {sys.executable} "$@" ;;
esac
"""


pytestmark = pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="chooses for a machine without an NVIDIA GPU")


class Setup(NamedTuple):
    """A copy of what scripts/setup reads, with commands of a machine to stand before the real ones on PATH."""

    root: Path
    bin: Path

    def command(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def run(self, *arguments: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        """Return the finished process and the arguments of each `pip install`."""
        log = self.root / "pip.log"
        log.unlink(missing_ok=True)
        environment = os.environ | {"PATH": f"{self.bin}:{os.environ['PATH']}", "PYTHON": str(self.bin / "fake-python")}
        done = subprocess.run(
            [self.root / "scripts/setup", *arguments], env=environment | variables, capture_output=True, text=True
        )
        lines = log.read_text().splitlines() if log.exists() else []
        return done, [line.removeprefix("-m pip install --disable-pip-version-check ") for line in lines]


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    made = Setup(tmp_path / "clone", tmp_path / "bin")
    (made.root / "scripts").mkdir(parents=True)
    made.bin.mkdir()
    shutil.copy(ROOT / "scripts/setup", made.root / "scripts/setup")
    shutil.copy(ROOT / "pyproject.toml", made.root)
    made.command("fake-python", PYTHON)
    made.command("nvidia-smi", "#!/bin/sh\nexit 9\n")
    made.command("uname", "#!/bin/sh\necho Linux x86_64\n")
    return made


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an index that has a page for torch."""
    folder = tmp_path_factory.mktemp("index")
    (folder / "whl/cpu/torch").mkdir(parents=True)

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/whl/cpu"
        server.shutdown()


@pytest.fixture
def silent() -> Iterator[str]:
    """The URL of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_linux_without_a_gpu_takes_cpu_builds_from_pytorchs_index(setup: Setup, index: str, machine: str) -> None:
    setup.command("uname", f"#!/bin/sh\necho Linux {machine}\n")
    done, installs = setup.run(TORCH_INDEX=index)
    assert done.returncode == 0, done.stderr
    assert installs == [f"--extra-index-url {index} torch==2.13.0", "torch==2.13.0 -e ."]
    assert "about 190 MB: PyTorch 2.13.0 for the CPU; about 70 MB: other packages" in done.stderr


@pytest.mark.parametrize("system", ["Darwin arm64", "Darwin x86_64", "Linux ppc64le"])
def test_other_systems_take_torch_from_pips_default_index(setup: Setup, index: str, system: str) -> None:
    setup.command("uname", f"#!/bin/sh\necho {system}\n")
    done, installs = setup.run(TORCH_INDEX=index)
    assert done.returncode == 0 and installs == ["torch==2.13.0", "torch==2.13.0 -e ."]


def test_a_machine_with_a_gpu_takes_the_cuda_build(setup: Setup, index: str) -> None:
    setup.command("nvidia-smi", "#!/bin/sh\nexit 0\n")
    done, installs = setup.run(TORCH_INDEX=index)
    assert done.returncode == 0 and installs == ["-e ."]
    assert "about 3 GB: PyTorch with CUDA" in done.stderr


@pytest.mark.parametrize("failure", ["refused", "no_page", "no_answer", "no_name"])
def test_an_index_out_of_reach_leaves_the_choice_to_pip(setup: Setup, index: str, silent: str, failure: str) -> None:
    url = {
        "refused": "http://127.0.0.1:9",
        "no_page": index.removesuffix("cpu"),
        "no_answer": silent,
        "no_name": "http://index.invalid/whl/cpu",
    }[failure]
    done, installs = setup.run(TORCH_INDEX=url)  # ends: the probe has a limit
    assert done.returncode == 0 and installs == ["torch==2.13.0", "torch==2.13.0 -e ."]
    assert f"can't be reached: {url}; pip looks in the sources that it is configured with" in done.stderr
    assert "else 3 GB with CUDA from PyPI" in done.stderr and "Alarm" not in done.stderr


def test_an_empty_index_leaves_the_choice_to_pip_without_a_probe(setup: Setup) -> None:
    done, installs = setup.run(TORCH_INDEX="")
    assert installs == ["torch==2.13.0", "torch==2.13.0 -e ."] and "reached" not in done.stderr


def test_progress_of_pip_is_shown_on_stderr(setup: Setup) -> None:
    done, _ = setup.run(TORCH_INDEX="")
    assert "Downloading a.whl (190.0 MB)" in done.stderr and done.stdout == ""


def test_a_second_run_does_nothing_and_a_run_after_a_failure_installs_again(setup: Setup) -> None:
    failed, _ = setup.run(TORCH_INDEX="", PIP_STATUS="1")
    assert failed.returncode == 2 and "pip install torch==2.13.0 failed" in failed.stderr
    first, installs = setup.run("test", TORCH_INDEX="")
    assert first.returncode == 0 and installs[-1] == "torch==2.13.0 -e .[test,browser]"
    assert setup.run(TORCH_INDEX="")[1] == [], "what is set up for tests serves too"
