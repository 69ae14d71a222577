"""The folder of stored responses: private, removed at the end, and by the next server after a kill."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from engine.errors import ConfigError
from server.workers.store_folder import PREFIX, YOUNG_SECONDS, StoreFolder

ROOT = Path(__file__).resolve().parents[3]
HOLD = "import server.workers.store_folder as s, sys; print(s.StoreFolder().path, flush=True); sys.stdin.read()"


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def aged(folder: Path) -> Path:
    then = time.time() - 2 * YOUNG_SECONDS
    os.utime(folder, (then, then))
    return folder


def test_a_folder_is_private_and_removed(temporary):
    folder = StoreFolder()
    assert folder.path.stat().st_mode & 0o777 == 0o700 and Path(folder.file).parent == folder.path
    Path(folder.file).write_text("x")
    folder.close()
    assert list(temporary.iterdir()) == []


def test_the_folder_of_a_killed_server_is_removed_by_the_next(temporary):
    command = [sys.executable, "-c", HOLD]
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True) as holder:
        held = aged(Path(holder.stdout.readline().strip()))
        young, other = temporary / f"{PREFIX}young", aged(Path(tempfile.mkdtemp(prefix="another-")))
        young.mkdir()
        StoreFolder().close()
        assert held.exists(), "in use"
        holder.kill()
    StoreFolder().close()
    assert not held.exists() and young.exists() and other.exists()


def test_without_a_writable_folder_the_server_does_not_start(temporary, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "missing"))
    with pytest.raises(ConfigError, match="TMPDIR"):
        StoreFolder()
