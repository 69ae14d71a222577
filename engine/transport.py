"""Where the loop runs: a thread of this process, or a process of its own. Commands go in, reports come out.

Owns threads, pipes and the child process, and that a dead child is noticed. Knows nothing of what the messages mean
but Ready, Dead and Stop.
"""

from __future__ import annotations

import logging
import multiprocessing
import queue
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Protocol

from engine.config import EngineConfig
from engine.errors import EngineDead, EngineError
from engine.messages import Command, Dead, Ready, Report, Stop
from engine.openmp import calm_openmp

logger = logging.getLogger(__name__)
OnReport = Callable[[Report], None]


class Transport(Protocol):
    """The way to one loop. `on_report` is called from a thread of the transport's."""

    def start(self, on_report: OnReport) -> None:
        """Begin to load the model; ends in a Ready or a Dead report."""

    def send(self, command: Command) -> None:
        """Hand over a command. Raises EngineDead if the loop is gone."""

    def stop(self, timeout: float) -> None:
        """End the loop and wait, at most `timeout` seconds; then by force where that is possible."""


def _run_loop(config: EngineConfig, receive: Callable[[float], Command | None], send: OnReport) -> None:
    """Build a loop and serve until it ends; every way out sends one Dead."""
    try:
        from engine.loading import build_loop  # torch is loaded here, and only where the loop runs
        from engine.model_source import resolve_model
        from engine.tokenizer import Tokenizer

        source = resolve_model(config.model)
        tokenizer = Tokenizer.try_load(source)
        loop = build_loop(config, source, tokenizer.eos_token_ids if tokenizer else ())
        if config.warmup == "full":
            loop.warm(_log_progress)
    except EngineError as error:
        return send(Dead(str(error), refused=error))
    except Exception as error:
        logger.exception("the engine did not start")
        return send(Dead(f"the engine did not start: {type(error).__name__}: {error}"))
    send(Ready(loop.info))
    loop.serve(receive, send)


def _log_progress(done: int, total: int, key: object) -> None:
    logger.info("captured %d of %d graphs: %s", done, total, key)


class ThreadTransport:
    """The loop in a daemon thread: for tests and small machines, where one interpreter is enough."""

    def __init__(self, config: EngineConfig):
        self._config = config
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, on_report: OnReport) -> None:
        self._thread = threading.Thread(target=_run_loop, args=(self._config, self._receive, on_report), daemon=True,
                                        name="encore-loop")
        self._thread.start()

    def _receive(self, timeout: float) -> Command | None:
        try:
            return self._commands.get(timeout=timeout) if timeout else self._commands.get_nowait()
        except queue.Empty:
            return None

    def send(self, command: Command) -> None:
        if self._thread is None or not self._thread.is_alive():
            raise EngineDead("the engine's thread has ended")
        self._commands.put(command)

    def stop(self, timeout: float) -> None:
        if self._thread is not None:
            self._commands.put(Stop())
            self._thread.join(timeout)
            if self._thread.is_alive():
                logger.error("the engine's thread did not end within %.0f s; it is left behind", timeout)


class ProcessTransport:
    """The loop in a spawned process: its steps don't share an interpreter with HTTP, and its death doesn't spread."""

    def __init__(self, config: EngineConfig):
        self._config = config
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None
        self._send_lock = threading.Lock()
        self._reader: threading.Thread | None = None
        self._listens = False  # before the model is loaded the child reads no commands

    @property
    def pid(self) -> int | None:
        """The child's process id, once started."""
        return self._process.pid if self._process else None

    def start(self, on_report: OnReport) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe(duplex=True)
        self._process = context.Process(target=_child, args=(self._config, theirs, logging.getLogger().level),
                                        name="encore-engine", daemon=True)
        self._process.start()
        theirs.close()  # else the end of the child would not end the pipe
        self._reader = threading.Thread(target=self._read, args=(on_report,), daemon=True, name="encore-reports")
        self._reader.start()

    def _read(self, on_report: OnReport) -> None:
        try:
            while True:
                report = self._connection.recv()
                self._listens = self._listens or isinstance(report, Ready)
                on_report(report)
                if isinstance(report, Dead):
                    return
        except (EOFError, OSError):
            self._process.join(1.0)
            on_report(Dead(f"the engine process ended with exit code {self._process.exitcode}"))

    def send(self, command: Command) -> None:
        try:
            with self._send_lock:
                self._connection.send(command)
        except (BrokenPipeError, OSError, AttributeError) as error:
            raise EngineDead("the engine process is gone") from error

    def stop(self, timeout: float) -> None:
        if self._process is None:
            return
        if self._process.is_alive() and self._listens:
            try:
                self.send(Stop())
            except EngineDead as gone:
                logger.debug("nothing to stop: %s", gone)
            self._process.join(timeout)
        if self._process.is_alive():
            if self._listens:
                logger.error("the engine process did not end within %.0f s; it is killed", timeout)
            self._process.kill()
            self._process.join()


def _child(config: EngineConfig, connection: Connection, log_level: int) -> None:
    """The engine process. A terminal's Ctrl-C reaches it too: the front decides when it ends, and its death ends it."""
    calm_openmp()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def receive(timeout: float) -> Command | None:
        try:
            return connection.recv() if connection.poll(timeout) else None
        except (EOFError, OSError):  # the front is gone
            return Stop()

    def send(report: Report) -> None:
        try:
            connection.send(report)
        except (BrokenPipeError, OSError) as gone:
            logger.debug("nobody reads reports: %s", gone)

    _run_loop(config, receive, send)
    connection.close()
