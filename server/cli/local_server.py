"""Run a server for this command alone: `encore serve` in a child process, on a free port of the loopback address."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import NamedTuple

from engine.errors import ConfigError, EngineError
from engine.utils.processes.child import ChildProcess
from server.config import ServerConfig
from server.keys import API_KEYS

POLL_SECONDS = 0.1
LOOPBACK = "127.0.0.1"


class LocalServer(NamedTuple):
    """A running server: its URL, its API key, and whether its process has ended."""

    url: str
    key: str
    process: ChildProcess


@contextlib.contextmanager
def local_server(config: ServerConfig) -> Iterator[LocalServer]:
    """Start a server, wait until it is ready, and kill it at the end. It also ends when this process is killed.

    Raises ConfigError with the reason if the server does not start.
    """
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    key = secrets.token_urlsafe()  # other users of this machine must not use the server
    config = dataclasses.replace(config, host=LOOPBACK, port=port, api_key_file=None, root_path="")
    process = ChildProcess("the server process", serve, config, key)
    try:
        url = f"http://{LOOPBACK}:{port}"
        while not _is_ready(url):
            if process.pipe.poll():
                raise ConfigError(_reason(process))
            time.sleep(POLL_SECONDS)
        yield LocalServer(url, key, process)
    finally:
        process.kill()
        process.wait()


def serve(pipe: Connection, config: ServerConfig, key: str) -> None:
    """Serve in a child process; send the error through the pipe if the server can't start."""
    from server.launch import run

    os.environ[API_KEYS] = key
    try:
        run(config)
    except EngineError as error:
        pipe.send(str(error))


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/ready", timeout=10):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _reason(process: ChildProcess) -> str:
    try:
        return str(process.pipe.recv())
    except EOFError:
        return process.exit_reason()
