"""TCP ports for programs that can't choose one themselves."""

from __future__ import annotations

import itertools
import os
import socket

FIRST, COUNT = 10_000, 1000  # of each xdist worker


def _first() -> int:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    return FIRST + COUNT * (int(worker) % 20)


_numbers = itertools.cycle(range(COUNT))
_offset = os.getpid() % COUNT  # so that two runs of the suite on one machine hardly meet


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody uses and that the kernel gives to nobody.

    The port of a socket that was bound to port 0 and closed again is in the kernel's ephemeral range: any connection of
    the machine may take it before the program under test binds it. These ports are below Linux's range, and each test
    process counts through its own.
    """
    for number in itertools.islice(_numbers, COUNT):
        port = _first() + (_offset + number) % COUNT
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:  # of another run
                continue
        return port
    raise AssertionError("no port is free")
