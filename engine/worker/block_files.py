"""Blocks of the KV cache in files of one folder: written and read in threads, and checked when they are read.

A file has a header (magic, length of the block, checksum) and the block. The checksum covers the name and the block, so
a file that was truncated, changed or renamed is found, and read as a miss. Files are in a subfolder per fingerprint of
the model, so blocks of other weights are never read; such subfolders are deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import struct
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from engine.errors import ConfigError

logger = logging.getLogger(__name__)

SETTING = "kv_offloading_disk_path"
MAGIC = b"ENCOREKV"
HEADER = struct.Struct("<8sQ32s")
SUFFIX, UNFINISHED = ".kv", ".part"
FOLDER = "encore-kv-"
READERS = 4  # hashing 4 blocks at a time is as fast as an NVMe disk reads them


class BlockFiles:
    """The files of one engine, below `folder`, which no other engine may use meanwhile.

    Raises ConfigError if the folder can't be used.
    """

    def __init__(self, folder: str):
        self._root = Path(folder)
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{SETTING}={folder!r} can't be used: {error.strerror}; give another folder") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(f"{SETTING}={folder!r} is in use by another engine: give each its folder") from error
        self._folder = self._root
        self._has_failed = self._is_closing = False
        self._readers = ThreadPoolExecutor(READERS, "kv-read")
        self._writer = ThreadPoolExecutor(1, "kv-write")  # one, so that writes and deletions keep their order

    def open(self, fingerprint: str) -> dict[str, int]:
        """Use the subfolder of a model; return the sizes of its files by name, least recently used first."""
        self._folder = self._root / (FOLDER + fingerprint)
        for other in self._root.glob(f"{FOLDER}*"):
            if other != self._folder:
                logger.info("deleting %s, which has keys and values of other weights", other)
                shutil.rmtree(other, ignore_errors=True)
        self._folder.mkdir(exist_ok=True)
        for part in self._folder.glob(f"*{UNFINISHED}"):
            part.unlink(missing_ok=True)
        found = [(path, path.stat()) for path in self._folder.glob(f"*{SUFFIX}")]
        found.sort(key=lambda one: one[1].st_mtime_ns)
        return {path.name.removesuffix(SUFFIX): stat.st_size for path, stat in found}

    def clear(self, fingerprint: str) -> None:
        """Delete all files after what is being written, and use the subfolder of another model from now on."""
        old, self._folder = self._folder, self._root / (FOLDER + fingerprint)
        new = self._folder

        def replace() -> None:
            shutil.rmtree(old, ignore_errors=True)
            new.mkdir(exist_ok=True)

        self._writer.submit(replace)

    def read(self, name: str, block: memoryview) -> Future[bool]:
        """Read a file into `block`, in a thread. The result is False if it is missing, truncated or corrupted."""
        return self._readers.submit(_read, self._folder / (name + SUFFIX), name, block)

    def write(self, name: str, block: memoryview) -> Future[int]:
        """Write `block` to a file, in a thread. The result is the size of the file, or 0 if it could not be written."""
        return self._writer.submit(self._write, self._folder, name, block)

    def delete(self, names: Iterable[str]) -> None:
        """Delete files, after what is being written."""
        paths = [self._folder / (name + SUFFIX) for name in names]
        for path in paths:
            self._writer.submit(path.unlink, missing_ok=True)

    def close(self) -> None:
        """Finish what has begun, and the deletions, and let others use the folder."""
        self._is_closing = True
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _write(self, folder: Path, name: str, block: memoryview) -> int:
        if self._is_closing:
            return 0
        part = folder / (name + UNFINISHED)
        try:
            with open(part, "wb", buffering=0) as file:
                head = HEADER.pack(MAGIC, len(block), _checksum(name, block))
                written = file.write(head)
                while written < HEADER.size + len(block):
                    written += file.write(block[written - HEADER.size :])
            part.replace(folder / (name + SUFFIX))
        except OSError as error:
            if not self._has_failed:
                logger.warning("%s: a block was not written: %s; this is logged once", folder, error)
            self._has_failed = True
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            return 0
        return HEADER.size + len(block)


def _read(path: Path, name: str, block: memoryview) -> bool:
    try:
        with open(path, "rb", buffering=0) as file:
            head = file.read(HEADER.size)
            size = os.fstat(file.fileno()).st_size
            if len(head) < HEADER.size or size != HEADER.size + len(block):
                return _refused(path, f"it has {size} bytes, {HEADER.size + len(block)} were expected")
            magic, length, checksum = HEADER.unpack(head)
            count = 0
            while count < len(block) and (got := file.readinto(block[count:])):
                count += got
        if (magic, length, count) != (MAGIC, len(block), len(block)) or checksum != _checksum(name, block):
            return _refused(path, "its checksum differs")
        os.utime(path)  # so that after a restart the least recently used file is known
    except OSError as error:
        return _refused(path, error.strerror or str(error))
    return True


def _refused(path: Path, reason: str) -> bool:
    logger.warning("%s is not used, and its tokens are computed: %s", path, reason)
    return False


def _checksum(name: str, block: memoryview) -> bytes:
    found = hashlib.blake2b(name.encode() + b"\0", digest_size=32)
    found.update(block)
    return found.digest()
