"""Stop signals: Ctrl-C reaches the whole process group, but only the parent decides when its children stop."""

from __future__ import annotations

import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def ignore_stop_signals() -> None:
    """Ignore and unblock the stop signals in a process that was started with these signals blocked.

    Left blocked, the signals would stay blocked in the process's own children.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
