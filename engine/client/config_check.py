"""Check a model's config.json in another process: the check imports torch, which a server's process must not."""

from __future__ import annotations

import subprocess
import sys

from engine.errors import ModelError

_SCRIPT = """
import sys
sys.path[:] = sys.argv[2:]
from engine.errors import ModelError
from engine.models.registry import config_from_folder
try:
    config_from_folder(sys.argv[1])
except ModelError as error:
    print(error)
    sys.exit(3)
"""
REFUSED = 3


def refuse_unsupported(folder: str) -> None:
    """Raise ModelError if the engine does not support the model whose config.json is in `folder`.

    An error of the check itself is ignored: the engine's process reads the config again.
    """
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, folder, *sys.path], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode == REFUSED:
        raise ModelError(done.stdout.strip())
