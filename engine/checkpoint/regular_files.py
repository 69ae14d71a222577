"""A check before a file is opened: opening a FIFO waits for a writer, and a device may never end."""

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
