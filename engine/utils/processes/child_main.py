"""Entry point of every child process; child.py runs this file as `python -P child_main.py NAME FD PARENT`.

FD is a file with two pickles: sys.path with the file descriptors that the process inherits, then its function, the
pipe to the parent and the other arguments. PARENT is the parent's process id.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1  # linux/prctl.h
ORPHAN_POLL_SECONDS = 1.0


def main() -> None:
    """Run the child's function. Its exception is logged and makes the exit code 1."""
    fd, parent = map(int, sys.argv[2:])
    end_with_parent(parent)
    with open(fd, "rb") as file:
        path, inherited = pickle.load(file)
        sys.path[:] = path
        from engine.utils.processes.signals import ignore_stop_signals

        ignore_stop_signals()
        for one in inherited:
            os.set_inheritable(one, False)  # a pipe held open by a grandchild would hide the end of this process
        function, arguments = pickle.load(file)
    if isinstance(function, str):
        module, _, name = function.partition(":")
        function = getattr(importlib.import_module(module), name)
    function(*arguments)


def end_with_parent(parent: int) -> None:
    """Make this process end when its parent does, even if the parent is killed and this process is in a long call.

    The kernel sends the signal when the parent's *thread* that started this process ends; child.py uses one that lives
    as long as the process. Systems without prctl get a thread that polls.
    """
    try:
        prctl = ctypes.CDLL(None).prctl
    except AttributeError:
        threading.Thread(target=_poll_parent, args=(parent,), daemon=True, name="encore-parent").start()
    else:
        if prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
            raise OSError("prctl(PR_SET_PDEATHSIG) failed: this process would outlive its parent")
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def _poll_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(ORPHAN_POLL_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
