"""Start one child process with a pipe, wait for its end, and stop or kill it."""

from __future__ import annotations

import atexit
import io
import logging
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from engine.utils.processes import child_main
from engine.utils.processes.signals import STOP_SIGNALS

logger = logging.getLogger(__name__)

EXIT_CODE_SECONDS = 5.0  # a closed pipe may precede the exit code by this much, on a busy machine


class ChildProcess:
    """A child process that runs `function(pipe, *args)`, where `pipe` is connected to `self.pipe`.

    `function` must be importable by the child: defined in a module, not in a function or in the program's main file.
    "package.module:name" names a function of a module that this process does not import. `args` are pickled; among
    them, connections, sockets and unbuffered files are inherited. `name` describes the process in messages, such as
    "the engine process".

    The child ignores SIGINT and SIGTERM from its first instruction. It ends when its parent does: by the kernel's
    SIGKILL if the parent is killed, and by `kill` when the parent's interpreter exits.

    Uses subprocess because multiprocessing would import the program's main file, and could not start a process from a
    daemonic one. Raises OSError if the system starts no process, and what pickle raises for the arguments.
    """

    def __init__(self, name: str, function: Callable[..., None] | str, *args: Any):
        self.name = name
        self.pipe, child_end = Pipe(duplex=True)
        try:
            with child_end:  # closed here once started: else the pipe would stay open after the child's end
                self._process = _start(name, function, (child_end, *args))
        except BaseException:
            self.pipe.close()
            raise
        _running.add(self)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while the process runs; -N after signal N."""
        code = self._process.poll()
        if code is not None:
            _running.discard(self)
        return code

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait up to `seconds` for the end of the process and return `exit_code`."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            logger.debug("%s still runs after %s s", self.name, seconds)
        return self.exit_code

    def cpu_seconds(self) -> float:
        """Return the processor time that the process has used; 0.0 once it has ended, and on a system without /proc."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def exit_reason(self) -> str:
        """Return the sentence that says how the process ended. Call it after the pipe has closed."""
        return f"{self.name} ended with exit code {self.wait(EXIT_CODE_SECONDS)}"

    def kill(self) -> None:
        """Kill the process without waiting. Does nothing once it has ended."""
        self._process.kill()

    def stop(self, seconds: float) -> None:
        """Wait up to `seconds` for a process that was asked to stop, then kill it. It has ended when this returns."""
        if self.wait(seconds) is None:
            logger.error("%s did not end within %g s; it is killed", self.name, seconds)
            self.kill()
            self.wait()


_running: set[ChildProcess] = set()


def running_children() -> list[ChildProcess]:
    """Return the child processes of this process that have not ended."""
    return [child for child in list(_running) if child.exit_code is None]


@atexit.register
def _kill_running() -> None:
    for child in running_children():
        child.kill()
        child.wait()


# ---- start ---------------------------------------------------------------------------------------------------------


def _start(name: str, function: Callable[..., None] | str, args: tuple) -> subprocess.Popen[bytes]:
    if not isinstance(function, str) and function.__module__ == "__main__":
        raise pickle.PicklingError(f"{name} can't import {function!r} from the main file: define it in a module")
    arguments = io.BytesIO()
    pickler = _Pickler(arguments)
    pickler.dump((function, args))
    prologue = pickle.dumps(([entry or os.getcwd() for entry in sys.path], pickler.fds))
    with anonymous_file("encore-arguments") as file:  # not in a folder: the arguments may hold API keys
        file.write(prologue + arguments.getvalue())
        file.seek(0)
        fds = (file.fileno(), *pickler.fds)
        command = [sys.executable, "-P", child_main.__file__, name, str(file.fileno()), str(os.getpid())]
        return _starter().run(lambda: subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds))


def anonymous_file(name: str, size: int = 0) -> io.FileIO:
    """Return a file without a path, of `size` zero bytes, to share with a child process. In memory where possible."""
    if hasattr(os, "memfd_create"):
        file = io.FileIO(os.memfd_create(name), "r+b")
    else:
        fd, path = tempfile.mkstemp(prefix=name)
        os.unlink(path)
        file = io.FileIO(fd, "r+b")
    file.truncate(size)
    return file


class _Pickler(pickle.Pickler):
    """Pickle arguments of a child process. Their file descriptors are collected in `fds`, for `pass_fds`."""

    def __init__(self, file: IO[bytes]):
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.fds: list[int] = []

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Connection):
            return Connection, (self._inherit(value), value.readable, value.writable)
        if isinstance(value, socket.socket):
            return socket.socket, (value.family, value.type, value.proto, self._inherit(value))
        if isinstance(value, io.FileIO):
            return io.FileIO, (self._inherit(value), value.mode)
        return NotImplemented

    def _inherit(self, value: Connection | socket.socket | io.FileIO) -> int:
        self.fds.append(value.fileno())
        return self.fds[-1]


class _Starter:
    """A thread that starts processes.

    PR_SET_PDEATHSIG kills a child when the thread that started it ends, so this one never does. It blocks the stop
    signals, and its children start with them blocked.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="encore-processes").start()

    def run(self, start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        """Call `start` in the thread and return its value or raise its error."""
        future: Future[subprocess.Popen[bytes]] = Future()
        self._tasks.put((start, future))
        return future.result()

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        while True:
            start, future = self._tasks.get()
            try:
                future.set_result(start())
            except BaseException as error:
                future.set_exception(error)


_lock = threading.Lock()
_only_starter: _Starter | None = None


def _starter() -> _Starter:
    """Return this process's starter. A forked process has no threads, so it gets a new one."""
    global _only_starter
    with _lock:
        if _only_starter is None or _only_starter.pid != os.getpid():
            _only_starter = _Starter()
        return _only_starter
