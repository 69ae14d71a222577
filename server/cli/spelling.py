"""Settings in error messages, spelled as the user gave them: a flag, an ENCORE_* variable or a key of a file.

The engine raises errors with the names of fields, as in Python: `max_num_seqs=0 must be …`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Mapping

from engine.errors import ConfigError
from server.cli.settings import PREFIX, read_environment, setting_types, written_keys


def spell_settings(
    message: str, args: argparse.Namespace, environ: Mapping[str, str] = os.environ, *, only_flags: bool = False
) -> str:
    """Return the message with the settings of a command spelled as given, and as flags if they were not given.

    `only_flags`: the command reads neither variables nor a file. A name without an underscore may be an ordinary word,
    so it counts only before `=`. Repeated calls change nothing.
    """
    flags = vars(args)
    path: str | None = None
    variables: Mapping[str, object] = {}
    keys: Mapping[str, str] = {}
    if not only_flags:
        path = getattr(args, "config", None) or environ.get("ENCORE_CONFIG")
        with contextlib.suppress(ConfigError):  # which is then the error to report
            variables = read_environment(environ)
            keys = written_keys(path) if path else {}

    def spelled(found: re.Match[str]) -> str:
        name = found[0]
        if name in flags:
            return "--" + name.replace("_", "-")
        if name in variables:
            return PREFIX + name.upper()
        if name in keys:
            return name if message[: found.start()].endswith(f"{path}: ") else f"{path}: {keys[name]}"
        return "--" + name.replace("_", "-")

    # Not part of a file's name, such as generation_config.json, of a path or of a flag.
    names = (name if "_" in name else f"{name}(?==)" for name in sorted({*setting_types(), *flags}, reverse=True))
    return re.sub(rf"(?<![\w./-])(?:{'|'.join(names)})(?![\w/-]|\.\w)", spelled, message)
