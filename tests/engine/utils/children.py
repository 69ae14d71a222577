"""Functions that child processes run in the tests of engine.utils.processes."""

from __future__ import annotations

import io
import logging
import os
import signal
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection

from engine.utils.processes.child import ChildProcess
from engine.utils.processes.group import ProcessGroup
from engine.utils.processes.log import set_up_child_log


def echo(pipe: Connection, *args: object) -> None:
    """Send the arguments, then each message back, until the pipe closes or a None comes."""
    pipe.send(args)
    try:
        while (message := pipe.recv()) is not None:
            pipe.send(message)
    except EOFError:
        sys.exit(3)


def fail(pipe: Connection, message: str) -> None:
    raise RuntimeError(message)


def hang(pipe: Connection) -> None:
    """Report readiness, then never read the pipe."""
    pipe.send("hanging")
    time.sleep(600)


def idle(pipe: Connection) -> None:
    """Never use the pipe."""
    time.sleep(600)


def busy(pipe: Connection) -> None:
    """Report readiness, then compute without ever releasing the GIL, as some C code does."""
    pipe.send("busy")
    sys.setswitchinterval(600)
    while True:
        pass


def signals(pipe: Connection) -> None:
    """Send the blocked and the ignored stop signals."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    pipe.send(([n for n in numbers if n in blocked], [n for n in numbers if signal.getsignal(n) == signal.SIG_IGN]))
    pipe.recv()


def use_files(pipe: Connection, other: Connection, listener: socket.socket, file: io.FileIO) -> None:
    """Use one inherited object of each kind, and report which descriptors a grandchild would inherit."""
    other.send(listener.getsockname())
    os.pwrite(file.fileno(), b"child", 0)
    pipe.send([one.fileno() for one in (pipe, other, listener, file) if os.get_inheritable(one.fileno())])


def log(pipe: Connection, formatter: bytes, level: int) -> None:
    """Log two messages."""
    set_up_child_log(formatter, level, prefix="rank 1: ")
    logging.getLogger("engine.test").info("an info of %d", 1)
    logging.getLogger("engine.test").debug("a debug message")


def parent_of(pipe: Connection, name: str) -> None:
    """Start a child that runs the function `name` of this module, and send its process id."""
    child = ChildProcess("a grandchild", globals()[name])
    pipe.send((child.pid, child.pipe.recv()))
    time.sleep(600)


def parent_in_thread(pipe: Connection) -> None:
    """Start a child from a thread that ends at once; send the child's answer from after the thread's end."""
    started: list[ChildProcess] = []

    def start() -> None:
        started.append(ChildProcess("a grandchild", echo))
        started[0].pipe.recv()

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    [child] = started
    time.sleep(0.3)
    child.pipe.send("alive")
    pipe.send(child.pipe.recv())


def leave_child_behind(pipe: Connection) -> None:
    """Start a group with a child that hangs, send its process id, and return."""
    group = ProcessGroup([lambda: ChildProcess("a grandchild", hang)])
    group.children[0].pipe.recv()
    pipe.send(group.pids[0])
