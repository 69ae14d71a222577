"""Attack a server and measure what it promises: memory, /health, good requests, and that everything becomes idle again.

    .venv/bin/python -m tests.soak.attacks                      # the default model, about ten minutes
    .venv/bin/python -m tests.soak.attacks --only trailers,pipe --seconds 5
    .venv/bin/python -m tests.soak.attacks --table benchmarks/results/attacks.md

Prints a line for each attack. Exits with 1 and the faults if a limit is exceeded. The limits are those of SECURITY.md.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from engine.config import EngineConfig
from tests.soak.attack_clients import ATTACKS, summaries
from tests.soak.serving import ENVIRONMENT, IDLE_GAUGES, Serving, command_of
from tests.soak.watch import GOOD, Watch, ask, processes_of, quantile, resident

MIB = 2**20
MEMORY_BYTES = 1536 * MIB  # of all processes above idle
HEALTH_SECONDS = 0.25  # 99th percentile
GOOD_SECONDS = 2.0  # of a good request while the engine lives
ENGINE_SECONDS = 10.0  # until a good request is served again after the engine was killed
IDLE_SECONDS = 90.0  # until everything is idle; clients that read nothing are closed after --write-seconds
END_SECONDS = 5.0  # until all processes have ended after the main process was killed
PHASES = ("loading", "warm-up", "serving", "streaming", "draining")


@dataclass
class Cell:
    """What was measured under one attack; None where it doesn't apply. Sizes in bytes, times in seconds."""

    name: str
    what: str
    peak: int | None = None  # memory above idle
    health: float | None = None
    good: float | None = None  # slowest good request
    after_kill: float | None = None  # until a good request was served
    idle: float | None = None  # until everything was idle, or every process had ended
    load: float = 0.0  # of the machine, over the last minute
    detail: str = ""
    faults: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Add a fault for each limit that is exceeded."""
        limits = (("memory", self.peak, MEMORY_BYTES), ("/health p99", self.health, HEALTH_SECONDS),
                  ("a good request", self.good, GOOD_SECONDS),
                  ("restart", self.after_kill, ENGINE_SECONDS))  # fmt: skip
        for what, value, limit in limits:
            if value is not None and value > limit:
                self.faults.append(f"{what}: {value:.4g}, limit {limit:g}")

    def row(self) -> str:
        """Return the cell as a row of a Markdown table."""
        good = "" if self.good is None else f"{1000 * self.good:.0f} ms"
        if self.after_kill is not None:
            good = f"{self.after_kill:.1f} s after the kill"
        shown = (
            self.name, "" if self.peak is None else f"{self.peak / MIB:+.0f} MiB",
            "" if self.health is None else f"{1000 * self.health:.0f} ms", good,
            "" if self.idle is None else f"{self.idle:.1f} s", f"{self.load:.1f}", "; ".join(self.faults) or "held",
        )  # fmt: skip
        return f"| {' | '.join(shown)} |"


class Campaign:
    """Runs attacks on servers of one model, `seconds` each."""

    def __init__(self, model: str | None, seconds: float, folder: Path, flags: Sequence[str] = ()):
        self.model, self.seconds, self.folder, self.flags = model, seconds, folder, flags
        self._numbers = iter(range(10**6))

    # ---- servers ----------------------------------------------------------------------------------------------------

    def command(self, *flags: str) -> list[str]:
        """Return the command of a server on a free port."""
        model = [] if self.model is None else ["--model", self.model]
        return [sys.executable, "-m", "server.cli", "serve", *model, "--port", "0", *self.flags, *flags]

    @contextmanager
    def server(
        self,
        *flags: str,
        wait: bool = True,
        stderr: int | None = None,
        preexec: Callable[[], None] | None = None,
    ) -> Iterator[Serving]:
        """Run a server, which logs to a file or to `stderr`. On exit, kills it and waits for all its processes.

        `preexec` runs in the new process before the command.
        """
        port = free_port()
        model = [] if self.model is None else ["--model", self.model]
        command = [sys.executable, "-m", "server.cli", "serve", *model, "--port", str(port), *self.flags, *flags]
        log = self.folder / f"server-{next(self._numbers)}.log"
        with log.open("wb") as lines:
            process = subprocess.Popen(
                command, stderr=lines if stderr is None else stderr, env=ENVIRONMENT, preexec_fn=preexec
            )
        url = f"http://127.0.0.1:{port}"
        try:
            if wait:
                wait_for(lambda: process.poll() is not None or ask(url, "GET", "/ready") == 200, "readiness", 300)
                if process.poll() is not None:
                    raise RuntimeError(f"the server ended with {process.returncode}: {log.read_text()[-2000:]}")
                for _ in range(3):  # what a first request loads belongs to the idle server
                    ask(url, "POST", "/v1/completions", GOOD)
                    ask(url, "GET", "/metrics")
            yield Serving(process, url)
        finally:
            left = processes_of(process.pid)
            process.kill()
            process.wait()
            wait_for(lambda: not any(map(runs, left)), "the processes' end", 60)

    # ---- attacks over HTTP ------------------------------------------------------------------------------------------

    def over_http(self, names: Sequence[str]) -> Iterator[Cell]:
        """Attack one server in many ways, one after the other."""
        if not names:
            return
        texts = dict(summaries())
        with self.server() as server:
            wait_for(lambda: not pending(server.url), "the graphs", 600)  # their memory belongs to the idle server
            idle = resident(server.process.pid)
            for name in names:
                cell = Cell(name, texts[name])
                with Watch(server.url, server.process.pid) as watch:
                    attack = subprocess.Popen(
                        [sys.executable, "-m", "tests.soak.attack_clients", name, server.url, str(self.seconds)],
                        stdout=subprocess.PIPE, text=True,
                    )  # fmt: skip
                    cell.detail = attack.communicate(timeout=self.seconds + 120)[0].strip()
                    if attack.returncode:
                        cell.faults.append("the attack failed")
                self.take(cell, watch, idle)
                cell.idle = until_idle(server)
                if cell.idle > IDLE_SECONDS:
                    cell.faults.append("not idle again")
                yield cell

    def take(self, cell: Cell, watch: Watch, idle: int) -> None:
        """Enter what was watched."""
        cell.peak, cell.health = watch.peak - idle, quantile(watch.health, 0.99)
        cell.good = max((seconds for _, seconds in watch.good), default=float("inf"))
        if watch.failed:
            cell.faults.append(f"{len(watch.failed)} good requests failed: {watch.failed[0][1]}")
        if watch.health_failures:
            cell.faults.append(f"/health failed {watch.health_failures} times")
        cell.load = os.getloadavg()[0]

    # ---- pipes, disks -----------------------------------------------------------------------------------------------

    def pipe(self) -> Cell:
        """Standard error into a pipe that nobody reads."""
        cell = Cell("pipe", (self.pipe.__doc__ or "").strip())
        unread, written = os.pipe()
        try:
            with self.server(stderr=written) as server:
                idle = resident(server.process.pid)
                with Watch(server.url, server.process.pid) as watch:
                    for _ in range(max(300, int(100 * self.seconds))):  # a log line each: more than a pipe holds
                        ask(server.url, "GET", "/no/such/route")
                self.take(cell, watch, idle)
                cell.idle = until_idle(server)
        finally:
            os.close(unread)
            os.close(written)
        return cell

    def disk(self, name: str, what: str, folder: Path) -> Cell:
        """Serve, with a graph manifest that can't be written, for longer than the interval of its saves."""
        cell = Cell(name, what)
        with self.server("--graph-manifest", str(folder / "manifest.json")) as server:
            idle = resident(server.process.pid)
            with Watch(server.url, server.process.pid) as watch:
                time.sleep(max(self.seconds, 35.0))
            self.take(cell, watch, idle)
            if server.metric("engine_restarts_total"):
                cell.faults.append("the engine was restarted")
            cell.idle = until_idle(server)
        return cell

    def full_disk(self) -> Cell:
        """A graph manifest on a full disk."""
        with small_disk(self.folder / "full") as folder:
            return self.disk("full_disk", (self.full_disk.__doc__ or "").strip(), folder)

    def read_only(self) -> Cell:
        """A graph manifest in a folder that can't be created: a file has its place."""
        place = self.folder / "not-a-folder"
        place.write_bytes(b"")
        return self.disk("read_only", (self.read_only.__doc__ or "").strip(), place)

    # ---- kills ------------------------------------------------------------------------------------------------------

    def engine_killed(self) -> Cell:
        """SIGKILL of the engine while it serves a stream."""
        cell = Cell("engine_killed", (self.engine_killed.__doc__ or "").strip())
        with self.server() as server:
            idle = resident(server.process.pid)
            with Watch(server.url, server.process.pid) as watch, streaming(server.url):
                time.sleep(1)
                killed = time.monotonic()
                os.kill(server.engine_pid, signal.SIGKILL)
                wait_for(lambda: any(at > killed for at, _ in watch.good), "a good request", 60)
            failed, watch.failed = watch.failed, []
            self.take(cell, watch, idle)
            cell.after_kill, cell.good = min(at for at, _ in watch.good if at > killed) - killed, None
            if {status for _, status in failed} - {503}:
                cell.faults.append(f"good requests failed with {failed}")
            cell.idle = until_idle(server)
        return cell

    def engine_killed_loading(self) -> Cell:
        """SIGKILL of the engine while it starts for the first time, which ends the server with an error."""
        cell = Cell("engine_killed: loading", (self.engine_killed_loading.__doc__ or "").strip())
        with self.server(wait=False) as server:
            wait_for(lambda: len(processes_of(server.process.pid)) > 1, "the engine's start", 60)
            time.sleep(0.5)  # in its imports
            left = processes_of(server.process.pid)
            os.kill(server.engine_pid, signal.SIGKILL)
            began = time.monotonic()
            status = server.process.wait(60)
            wait_for(lambda: not any(map(runs, left)), "the processes' end", 60)
            cell.idle, cell.load = time.monotonic() - began, os.getloadavg()[0]
            if not status:
                cell.faults.append("exit status 0")
        return cell

    def engine_killed_warm_up(self) -> Cell:
        """SIGKILL of the engine while it captures graphs in the background."""
        cell = Cell("engine_killed: warm-up", (self.engine_killed_warm_up.__doc__ or "").strip())
        with self.server() as server:
            if not pending(server.url):
                cell.faults.append("all graphs were captured before the kill")
            os.kill(server.engine_pid, signal.SIGKILL)
            cell.after_kill = wait_for(lambda: ask(server.url, "POST", "/v1/completions", GOOD) == 200, "an answer", 60)
            cell.load, cell.idle = os.getloadavg()[0], until_idle(server)
        return cell

    def worker_killed(self) -> Cell:
        """SIGKILL of one of two API workers while both serve."""
        cell = Cell("worker_killed", (self.worker_killed.__doc__ or "").strip())
        with self.server("--http-workers", "2") as server:
            workers = [pid for pid in server.child_pids() if "API worker" in command_of(pid)]
            idle = resident(server.process.pid)
            with Watch(server.url, server.process.pid) as watch:
                time.sleep(1)
                killed = time.monotonic()
                os.kill(workers[0], signal.SIGKILL)
                wait_for(lambda: any(at > killed for at, _ in watch.good), "a good request", 60)
                wait_for(lambda: not runs(workers[0]) and len(server.child_pids()) > len(workers), "a replacement", 60)
                time.sleep(1)
            broken = [status for _, status in watch.failed if status is not None]  # None: on the killed worker
            watch.failed, watch.health_failures = [], max(0, watch.health_failures - len(watch.failed) - 1)
            self.take(cell, watch, idle)
            if broken:
                cell.faults.append(f"good requests failed with {broken}")
            cell.idle = until_idle(server)
        return cell

    def closed_stderr(self) -> Cell:
        """Standard error closed: serve, then end with status 0 at SIGTERM."""
        cell = Cell("closed_stderr", (self.closed_stderr.__doc__ or "").strip())
        with self.server(preexec=lambda: os.close(2)) as server:
            server.process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            status = server.process.wait(60)
            cell.idle, cell.load = time.monotonic() - began, os.getloadavg()[0]
            if status:
                cell.faults.append(f"exit status {status}")
        return cell

    def main_killed(self, phase: str) -> Cell:
        """SIGKILL of the main process."""
        cell = Cell(f"main_killed: {phase}", (self.main_killed.__doc__ or "").strip())
        flags = ["--warmup", "full"] if phase == "warm-up" else []
        with self.server(*flags, wait=phase not in ("loading", "warm-up")) as server, ExitStack() as stack:
            pid = server.process.pid
            if phase == "loading":
                wait_for(lambda: len(processes_of(pid)) > 1, "the engine's start", 60)
            if phase == "warm-up":
                wait_for(lambda: "captured" in reasons(server), "the warm-up", 300)
            if phase in ("streaming", "draining"):
                stack.enter_context(streaming(server.url))
            if phase == "draining":
                server.process.send_signal(signal.SIGTERM)
                time.sleep(0.5)
            left = processes_of(pid)
            began = time.monotonic()
            server.process.kill()
            server.process.wait()
            wait_for(lambda: not any(map(runs, left)), "the processes' end", 60)
            cell.idle, cell.load = time.monotonic() - began, os.getloadavg()[0]
            if cell.idle > END_SECONDS:
                cell.faults.append("processes were left")
        return cell

    def cells(self, only: Sequence[str] = ()) -> Iterator[Cell]:
        """Run the attacks, or those named `only`, and yield what was measured."""

        def wanted(name: str) -> bool:
            return not only or name in only

        yield from self.over_http([name for name in ATTACKS if wanted(name)])
        others: list[tuple[str, Callable[[], Cell]]] = [
            ("pipe", self.pipe), ("full_disk", self.full_disk), ("read_only", self.read_only),
            ("engine_killed", self.engine_killed), ("engine_killed", self.engine_killed_loading),
            ("engine_killed", self.engine_killed_warm_up), ("worker_killed", self.worker_killed),
            ("closed_stderr", self.closed_stderr),
        ]  # fmt: skip
        yield from (run() for name, run in others if wanted(name))
        yield from (self.main_killed(phase) for phase in PHASES if wanted("main_killed"))


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def runs(pid: int) -> bool:
    """Return whether a process runs; one that has ended but was not waited for does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def pending(url: str) -> int:
    """Return the number of graphs that a server still captures in the background."""
    with urllib.request.urlopen(url + "/ready", timeout=30) as answer:
        return int(json.load(answer)["warm"].get("pending", 0))


def reasons(server: Serving) -> str:
    """Return the body of /ready, whatever its status; "" before the server listens."""
    with suppress(OSError), closing(http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=5)) as ready:
        ready.request("GET", "/ready")
        return ready.getresponse().read().decode()
    return ""


@contextmanager
def streaming(url: str) -> Iterator[None]:
    """Read a long stream in the background, until it ends or breaks."""
    body = json.dumps({"prompt": "red fox", "max_tokens": 4000, "ignore_eos": True, "stream": True}).encode()
    thread = threading.Thread(target=ask, args=(url, "POST", "/v1/completions", body, 120))
    thread.start()
    time.sleep(0.3)
    yield
    thread.join()


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount a full file system of 64 KiB. Needs the right to mount."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], check=True)
    try:
        with suppress(OSError), (folder / "rest").open("wb", buffering=0) as rest:  # until no space is left
            while True:
                rest.write(b"a" * 4096)
        yield folder
    finally:
        # Threads of a killed process may hold their files for a moment after its end.
        wait_for(lambda: subprocess.run(["umount", str(folder)]).returncode == 0, "the unmount", 30)


def until_idle(server: Serving) -> float:
    """Wait until no request is running, no body held and no KV page used; return the seconds that took, or infinity."""
    began = time.monotonic()
    while time.monotonic() - began <= IDLE_SECONDS:
        with suppress(OSError):  # the engine is being restarted
            if not any(server.metric(name) for name in (*IDLE_GAUGES, "request_body_bytes", "kv_cache_usage_perc")):
                return time.monotonic() - began
        time.sleep(0.1)
    return float("inf")


def wait_for(condition: Callable[[], bool], what: str, seconds: float) -> float:
    """Wait until `condition` holds and return how long that took. Raises TimeoutError."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"{what} did not come within {seconds:g} s")
        time.sleep(0.02)
    return time.monotonic() - began


HEADER = """\
| attack | memory above idle | `/health` p99 | slowest good request | idle after | load | result |
|---|---|---|---|---|---|---|
"""


def page(
    rows: Sequence[str], command: str, model: str, title: str = "Attacks on a server", header: str = HEADER
) -> str:
    """Return the Markdown page of the results."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return (
        f"# {title}\n\n`{command}`, commit {commit}, {time.strftime('%Y-%m-%d')}, {model}, "
        f"{os.cpu_count()} CPUs, Python {platform.python_version()}.\n\n"
        f"Limits: {MEMORY_BYTES // MIB} MiB above idle for all processes together; 250 ms; 2 s, and 10 s after a kill "
        f"of the engine; idle within {IDLE_SECONDS:g} s. `load`: of the machine, over the minute before. After a kill "
        "of the main process, idle means that all processes have ended.\n\n"
        + header + "\n".join(rows) + "\n"
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each attack over HTTP")
    parser.add_argument("--only", default="", help="names of attacks, comma-separated")
    parser.add_argument("--table", type=Path, help="write the results there, as Markdown")
    found = parser.parse_args()
    rows, faults = [], []
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(found.model, found.seconds, Path(folder))
        for cell in campaign.cells(tuple(filter(None, found.only.split(",")))):
            cell.check()
            rows.append(cell.row())
            faults += [f"{cell.name}: {fault}" for fault in cell.faults]
            print(cell.row(), cell.detail, flush=True)
            if found.table is not None:
                command = f"python -m tests.soak.attacks {' '.join(sys.argv[1:])}".strip()
                found.table.write_text(page(rows, command, found.model or EngineConfig().model), encoding="utf-8")
    print("\n".join(faults), file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
