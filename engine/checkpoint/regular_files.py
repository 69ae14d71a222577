"""Checks before a file is opened or given to a library: opening a FIFO waits for a writer, a device may never end.

Sizes are limited by the file's name. No known model comes near a limit: Gemma 3's tokenizer.json, among the largest,
has 33 MB; a model index with 140,000 experts' weights 14 MB.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from engine.errors import ModelError

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}
MIB = 2**20
_VOCABULARIES = frozenset({"tokenizer.json", "vocab.json", "tekken.json"})
_LIMITS = {
    ".json": 32 * MIB,
    ".jinja": MIB,
    ".index.json": 128 * MIB,
    ".model": 128 * MIB,
    ".tiktoken": 128 * MIB,
    ".txt": 128 * MIB,
}
_VOCABULARY_LIMIT = 128 * MIB


def require_regular_file(path: str | Path) -> None:
    """Raise ModelError if `path`, links followed, is anything but a regular file. A missing file is left to `open`."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read: {getattr(error, 'strerror', None) or error}") from error
    if not stat.S_ISREG(mode):
        raise ModelError(f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'no regular file')}: give a regular file")


def size_limit(name: str) -> int | None:
    """Return how many bytes a model's file may have, by its name; None: any number, as for weights."""
    if name in _VOCABULARIES:
        return _VOCABULARY_LIMIT
    matching = [suffix for suffix in _LIMITS if name.endswith(suffix)]
    return _LIMITS[max(matching, key=len)] if matching else None


def require_limited_file(path: str | Path) -> None:
    """Raise ModelError if `path` is no regular file, or larger than `size_limit` of its name allows."""
    require_regular_file(path)
    limit = size_limit(os.path.basename(path))
    try:
        size = os.stat(path).st_size
    except FileNotFoundError:
        return
    if limit is not None and size > limit:
        raise ModelError(f"{path} has {size} bytes, and at most {limit} are read: give the model's own file")


def read_limited_text(path: str | Path) -> str:
    """Return the UTF-8 text of a regular file within its `size_limit`.

    Raises ModelError for another kind of file and for a larger one, FileNotFoundError, OSError or ValueError if it
    can't be read.
    """
    require_limited_file(path)
    return Path(path).read_text(encoding="utf-8")
