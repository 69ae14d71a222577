"""Helpers of the soak tests: a server as a process, load generators in other processes, and memory from /proc."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
IDLE_GAUGES = ("num_requests_running", "num_requests_waiting", "num_requests_in_flight")


@dataclass
class Serving:
    """A server in its own process."""

    process: subprocess.Popen[bytes]
    url: str

    def get(self, path: str) -> str:
        """Return the body of a GET request."""
        with urllib.request.urlopen(self.url + path, timeout=120) as response:
            return response.read().decode()

    def metric(self, name: str) -> float:
        """Return the sum of a metric's samples."""
        found = re.findall(rf"^encore_{name}(?:{{[^}}]*}})? ([-+.\de]+)$", self.get("/metrics"), re.MULTILINE)
        if not found:
            raise LookupError(f"/metrics has no encore_{name}")
        return sum(map(float, found))

    @property
    def engine_pid(self) -> int:
        """The engine's process id. Raises ValueError if there is no such process now."""
        (found,) = (pid for pid in self.child_pids() if "the engine process" in command_of(pid))
        return found

    def child_pids(self) -> list[int]:
        """Return the process ids of the server's children."""
        children: list[int] = []
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
                children += map(int, (task / "children").read_text().split())
        return children

    def memory(self) -> dict[str, int]:
        """Return the resident bytes of server and engine."""
        return {"server": resident(self.process.pid), "engine": resident(self.engine_pid)}


def command_of(pid: int) -> str:
    """Return the command line of a process; "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def resident(pid: int) -> int:
    """Return the resident bytes of a process."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):  # it ended after its pid was listed
        return 0


@contextmanager
def serving(model: Path, log: Path, *flags: str) -> Iterator[Serving]:
    """Run `encore serve` on a free port of 127.0.0.1 and wait until it is ready; stop it by SIGTERM. Logs to a file."""
    command = [sys.executable, "-m", "server.cli", "serve", "--model", str(model), "--port", "0",
               "--graph-manifest", "none", *flags]  # fmt: skip
    with log.open("wb") as lines:
        process = subprocess.Popen(command, stderr=lines, env=ENVIRONMENT)
    try:
        yield asyncio.run(_ready(process, log))
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(300)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


async def _ready(process: subprocess.Popen[bytes], log: Path, seconds: float = 600) -> Serving:
    async with asyncio.timeout(seconds):
        while process.poll() is None:
            found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
            if found:
                handle = Serving(process, found.group())
                try:
                    handle.get("/ready")
                    return handle
                except OSError:  # not listening yet, or 503
                    pass
            await asyncio.sleep(0.1)
    raise RuntimeError(f"the server ended with {process.returncode}: {log.read_text()[-2000:]}")


def start_load(url: str, **options: Any) -> subprocess.Popen[str]:
    """Start tests/soak/load.py in its own process."""
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.soak.load", url, *flags], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )


def results(loads: Sequence[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """Wait for load generators and return their reports."""
    found = []
    for load in loads:
        out, _ = load.communicate()
        if load.returncode:
            raise RuntimeError(f"the load ended with {load.returncode}")
        found.append(json.loads(out))
    return found
