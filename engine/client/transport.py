"""Run the engine loop in a thread or in a child process: commands go in, reports come out.

Handles threads, pipes and the child process, and detects its death. Of all messages, only Ready, Dead and Stop are
interpreted here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import pickle
import queue
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

from engine.client.event_codec import ReportSplitter, encode_events
from engine.client.frames import decode_report, encode_report
from engine.config import EngineConfig
from engine.errors import EngineDead, EngineError
from engine.protocol.messages import Command, Dead, Events, Ready, Report, Snapshot, Stop
from engine.utils.onednn import limit_onednn_caches
from engine.utils.openmp import limit_openmp_spinning
from engine.utils.processes.child import ChildProcess
from engine.utils.processes.log import log_format, set_up_child_log
from graph_cache.utils.garbage import no_garbage_collections

logger = logging.getLogger(__name__)
OnReport = Callable[[Report], None]
# The function that an engine process runs until a Stop: called with the config, `receive(timeout)` and `send`.
Run = Callable[[EngineConfig, Callable[[float], Command | None], OnReport], None]


class Transport(Protocol):
    """Connection to one engine loop. `on_report` is called from a thread of the transport."""

    def start(self, on_report: OnReport) -> None:
        """Start loading the model. A Ready or a Dead report follows."""

    def send(self, command: Command) -> None:
        """Send a command. Raises EngineDead if the loop has ended."""

    def stop(self, timeout: float) -> None:
        """Stop the loop and wait up to `timeout` seconds, then kill it if possible."""


def run_loop(config: EngineConfig, receive: Callable[[float], Command | None], send: OnReport) -> None:
    """Build a loop and serve until it ends. Every exit path sends exactly one Dead."""
    try:
        with no_garbage_collections():
            from engine.checkpoint.generation_config import sampling_defaults
            from engine.checkpoint.pooling_config import read_pooling_config
            from engine.checkpoint.source import resolve_model
            from engine.core.builder import build_loop  # imports torch, which only the process with the loop needs
            from engine.core.service import serve
            from engine.models.registry import config_from_folder
            from engine.text.tokenizer import Tokenizer
            from engine.utils.progress import Progress

            source = resolve_model(config.model, config_from_folder, config.progress)
            defaults = sampling_defaults(config.generation_config, source)
            pooling = read_pooling_config(config, source)
            tokenizer = Tokenizer.try_load(source)
            gc.freeze()  # or the first collection afterwards takes as long as those left out
        loop = build_loop(config, source, tokenizer)
        send(Snapshot(loop.stats()))  # before Ready and before the first capture, which is the slowest
        if config.warmup == "full":
            with Progress("capturing", "graphs", enabled=config.progress) as shown:

                def progress(done: int, total: int, key: Any) -> None:
                    shown(done, total, key)
                    send(Snapshot(loop.stats()))  # shows progress in the health report

                loop.captures.warm(progress)
    except EngineDead as error:
        # A worker process ended, which a restart may fix: `refused` stays unset.
        return send(Dead(f"the engine did not start: {error}"))
    except EngineError as error:
        return send(Dead(str(error), refused=error))
    except Exception as error:
        logger.exception("the engine did not start")
        return send(Dead(f"the engine did not start: {type(error).__name__}: {error}"))
    send(Ready(dataclasses.replace(loop.info, sampling_defaults=defaults, pooling=pooling)))
    serve(loop, receive, send)


class ThreadTransport:
    """Run the loop in a daemon thread: for tests and small machines, where one interpreter is enough."""

    def __init__(self, config: EngineConfig):
        self._config = config
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, on_report: OnReport) -> None:
        self._thread = threading.Thread(
            target=run_loop, args=(self._config, self._receive, on_report), daemon=True, name="encore-loop"
        )
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
                logger.error("the engine's thread did not end within %.0f s; it is abandoned", timeout)


class Outbox:
    """Send pickled messages from a separate thread, so that `put` never blocks on the receiver."""

    def __init__(self, connection: Connection, name: str):
        self._connection = connection
        self._messages: queue.SimpleQueue[bytes | memoryview | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, daemon=True, name=name)
        self._thread.start()

    def put(self, message: bytes | memoryview) -> None:
        """Queue a message. It is dropped if the receiver has disconnected."""
        self._messages.put(message)

    def close(self) -> None:
        """Send the queued messages, waiting up to 1 s, then shut the connection down in both directions."""
        self._messages.put(None)
        self._thread.join(1.0)
        if self._connection.closed:
            return
        sock = socket.socket(
            fileno=self._connection.fileno()
        )  # shares the descriptor: a dup may fail at the open-file limit
        try:
            with contextlib.suppress(OSError):  # the other end is closed already
                sock.shutdown(socket.SHUT_RDWR)  # close() alone would not wake a thread that is reading
        finally:
            sock.detach()

    def _write(self) -> None:
        while (message := self._messages.get()) is not None:
            try:
                self._connection.send_bytes(message)
            except OSError as error:
                logger.debug("the receiver has disconnected: %s", error)  # the connection's reader reports the end
                return


class _Child(NamedTuple):
    """A started engine process, and the threads that read and write its pipe."""

    process: ChildProcess
    reader: threading.Thread
    outbox: Outbox


class ProcessTransport:
    """Run the loop in a child process: its steps don't share an interpreter with HTTP, and a crash stays contained.

    With `routed`, reports come as AddressedReports, for an EngineRouter. `run` is the function that the process runs.
    """

    def __init__(self, config: EngineConfig, *, routed: bool = False, run: Run = run_loop):
        self._config, self._routed, self._run = config, routed, run
        self._child: _Child | None = None
        self._has_ended = False
        self._accepts_commands = False  # the child reads no commands until the model is loaded

    @property
    def pid(self) -> int | None:
        """The child's process id, or None before `start`."""
        return self._child.process.pid if self._child else None

    def start(self, on_report: OnReport) -> None:
        process = ChildProcess(
            "the engine process", _run_in_child, self._config, self._routed, self._run, *log_format()
        )
        reader = threading.Thread(target=self._read, args=(process, on_report), daemon=True, name="encore-reports")
        self._child = _Child(process, reader, Outbox(process.pipe, "encore-commands"))
        reader.start()

    def _read(self, process: ChildProcess, on_report: OnReport) -> None:
        last = None
        try:
            while not isinstance(last, Dead):
                last = decode_report(process.pipe.recv_bytes())
                self._accepts_commands = self._accepts_commands or isinstance(last, Ready)
                self._has_ended = isinstance(last, Dead)
                on_report(last)
        except (EOFError, OSError):
            self._has_ended = True
            on_report(Dead(process.exit_reason()))
        except Exception as error:  # without this report, later ones are not reliable either: end the process
            logger.exception("can't read a report of the engine process")
            self._has_ended = True
            process.kill()
            on_report(Dead(f"can't read a report of the engine process: {type(error).__name__}: {error}"))

    def send(self, command: Command) -> None:
        """Queue a command. Never blocks, even if the pipe is full because the child is in a long step or hangs."""
        self.forward(pickle.dumps(command, pickle.HIGHEST_PROTOCOL))

    def forward(self, payload: bytes) -> None:
        """Queue a pickled command, as `send`."""
        if self._child is None or self._has_ended:
            raise EngineDead("the engine process has ended")
        self._child.outbox.put(payload)

    def kill(self) -> None:
        """Kill the child, if there is one. A Dead report follows as for any other exit."""
        if self._child is not None:
            self._child.process.kill()

    def stop(self, timeout: float) -> None:
        if self._child is None:
            return
        process, reader, outbox = self._child
        if self._accepts_commands:
            try:
                self.send(Stop())
            except EngineDead as error:
                logger.debug("nothing to stop: %s", error)
        else:
            process.kill()
        process.stop(timeout)
        outbox.close()
        reader.join(1.0)
        process.pipe.close()


def _run_in_child(
    connection: Connection, config: EngineConfig, routed: bool, run: Run, formatter: bytes, log_level: int
) -> None:
    """Main function of the engine process. It runs until its parent sends Stop or dies."""
    limit_openmp_spinning()
    limit_onednn_caches()
    set_up_child_log(formatter, log_level)
    splitter = ReportSplitter() if routed else None

    def receive(timeout: float) -> Command | None:
        try:
            command = connection.recv() if connection.poll(timeout) else None
        except (EOFError, OSError):  # the parent process has ended
            return Stop()
        return command if splitter is None or command is None else splitter.incoming(command)

    def send(report: Report) -> None:
        if isinstance(report, Events):
            report = encode_events(report.events)
        if splitter is not None:
            report = splitter.outgoing(report)
        try:
            connection.send_bytes(encode_report(report))
        except (BrokenPipeError, OSError) as error:
            logger.debug("the parent process reads no reports: %s", error)

    run(config, receive, send)
    connection.close()
