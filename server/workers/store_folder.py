"""The temporary folder of the file in which API workers store responses."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from engine.errors import ConfigError

PREFIX = "encore-responses-"
YOUNG_SECONDS = 60.0  # a folder that was made this recently may not be locked yet


class StoreFolder:
    """A folder that only this user can read. `close` removes it.

    A process that is killed leaves its folder. The next one removes it: a folder is in use while it is locked. Raises
    ConfigError if no folder can be made.
    """

    def __init__(self) -> None:
        try:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        except OSError as error:
            raise ConfigError(
                f"no folder for stored responses: {error.strerror or error}; set TMPDIR to a writable folder, or "
                "--response-store-entries 0"
            ) from error
        self._lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for other in self.path.parent.glob(f"{PREFIX}*"):
            if other != self.path:
                _remove_abandoned(other)

    @property
    def file(self) -> str:
        """The path of the file."""
        return str(self.path / "responses")

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_abandoned(folder: Path) -> None:
    """Remove a folder that no process has locked. One of another user or of a starting server is left alone."""
    try:
        if time.time() - folder.stat().st_mtime < YOUNG_SECONDS:
            return
        lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:  # another user's, or removed by now
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return  # in use
    finally:
        os.close(lock)
