"""Open standard input, output and error if the process was started without them, as by `2>&-`."""

from __future__ import annotations

import os
import sys


def open_standard_files() -> None:
    """Open the null device in place of each closed standard file.

    Else the next file or socket would get its number, and what is printed to standard error would be written there.
    Call it before anything is opened.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
