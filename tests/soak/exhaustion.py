"""Exhaust a server's resources, stop or kill its processes, restart it: what SECURITY.md promises must hold.

    .venv/bin/python -m tests.soak.exhaustion                    # a tiny model, full size, about ten minutes
    .venv/bin/python -m tests.soak.exhaustion --only many_streams --streams 200
    .venv/bin/python -m tests.soak.exhaustion --table benchmarks/results/exhaustion.md

Prints a line for each run. Exits with 1 and the faults if a limit is exceeded. The limits are those of attacks.py. The
full disk is a mounted one, which needs the right to mount.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import write_tiny_model
from tests.soak.attacks import (
    END_SECONDS,
    Campaign,
    Cell,
    free_port,
    page,
    reasons,
    runs,
    small_disk,
    streaming,
    until_idle,
    wait_for,
)
from tests.soak.serving import ENVIRONMENT, Serving, command_of, results, start_load
from tests.soak.watch import GOOD, Watch, ask, processes_of, resident

HEADER = """\
| run | memory above idle | `/health` p99 | slowest good request | idle after | load | result | detail |
|---|---|---|---|---|---|---|---|
"""
LOADS = 2  # load generator processes
SHARED_MEMORY = Path("/dev/shm")
ADMIN_KEY = "admin-of-the-soak-test"
SECONDS_UNTIL_REPLACED = 120.0  # a worker that does not respond for this long is replaced
# Many graphs, so that there is time to see their capture.
FULL_WARM_UP = ("--warmup", "full", "--max-num-seqs", "24", "--graph-buckets", ",".join(map(str, range(1, 25))))
FLAGS = ("--num-threads", "1", "--max-model-len", "1024", "--graph-manifest", "none")


@dataclass(frozen=True)
class Size:
    """How much each run asks for; the defaults are the full size."""

    streams: int = 1000
    tokens: int = 32
    exhausting: int = 64
    stopped_seconds: float = SECONDS_UNTIL_REPLACED + 15
    restarts: int = 50
    mounts: bool = True


class Exhaustion:
    """Runs on servers of one model. Each returns what was measured."""

    def __init__(self, campaign: Campaign, size: Size):
        self._campaign, self._size = campaign, size

    def many_streams(self) -> Cell:
        """Streams at once, all of them running."""
        size, cell = self._size, self._cell(self.many_streams)
        # Without a limit on what runs, so that the streams are open together.
        flags = ["--max-num-seqs", str(size.streams + 8), "--warmup", "lazy", "--max-waiting", "2048"]
        with self._campaign.server(*flags) as server:
            self._load(server, cell, size.streams, size.tokens)
            cell.idle = until_idle(server)
        return cell

    def kv_exhaustion(self) -> Cell:
        """More tokens than the KV cache holds: sequences are preempted, and all finish."""
        size, cell = self._size, self._cell(self.kv_exhaustion)
        flags = ["--max-num-seqs", str(size.exhausting), "--num-pages", "80", "--page-size", "16", "--warmup", "lazy"]
        with self._campaign.server(*flags) as server:
            self._load(server, cell, size.exhausting, 200)
            preempted = server.metric("num_preemptions_total")
            cell.detail += f"; {preempted:.0f} preemptions"
            if not preempted:
                cell.faults.append("no sequence was preempted: the run proves nothing")
            cell.idle = until_idle(server)
        return cell

    def _load(self, server: Serving, cell: Cell, streams: int, tokens: int) -> None:
        """Send `streams` requests at once and watch."""
        idle = resident(server.process.pid)
        with Watch(server.url, server.process.pid) as watch:
            each = streams // LOADS
            loads = [start_load(server.url, requests=each, streams=each, tokens=tokens, seed=n) for n in range(LOADS)]
            reports = results(loads)
        self._campaign.take(cell, watch, idle)
        finished, together = (sum(one[name] for one in reports) for name in ("finished", "streams_together"))
        first = max(one["first_token_ms"].get("p99", 0) for one in reports)
        cell.detail = f"{finished} finished, {together} together, first token p99 {first:.0f} ms"
        if finished != each * LOADS:
            cell.faults.append(f"{finished} of {each * LOADS} finished: {[one['refused'] for one in reports]}")

    def full_disk(self) -> Cell:
        """The log, a profile and the graph manifest on a full disk."""
        cell = self._cell(self.full_disk)
        with ExitStack() as stack:
            preexec: Callable[[], None] | None = None
            if self._size.mounts:
                folder = stack.enter_context(small_disk(self._campaign.folder / "full-disk"))
                log = stack.enter_context((folder / "log").open("ab"))
            else:  # a file of this size is as large as it may become, for every process of the server
                folder, log = self._campaign.folder / "limited", stack.enter_context(open("/dev/full", "wb"))
                preexec = limit_file_sizes
            key = self._campaign.folder / "admin-key"
            key.write_text(ADMIN_KEY)
            flags = ["--profile-folder", str(folder), "--graph-manifest", str(folder / "manifest.json"),
                     "--admin-key-file", str(key)]  # fmt: skip
            server = stack.enter_context(self._campaign.server(*flags, stderr=log.fileno(), preexec=preexec))
            idle = resident(server.process.pid)
            started = admin(server.url, "/profile/start")  # the engine answers nothing else meanwhile
            with Watch(server.url, server.process.pid) as watch:
                for _ in range(20):
                    answers(server.url)
                    ask(server.url, "GET", "/no/such/route")  # a line of the log
            stopped, answer = admin(server.url, "/profile/stop")
            if not answers(server.url):
                cell.faults.append("no answer afterwards")
            self._campaign.take(cell, watch, idle)
            cell.detail = f"profile: {stopped} {answer[:160]}"
            if started[0] != 200 or stopped != 400 or "can't write the profile" not in answer:
                cell.faults.append(f"/profile/start: {started}, /profile/stop: {stopped} {answer}")
            if server.metric("engine_restarts_total"):
                cell.faults.append("the engine was restarted")
            cell.idle = until_idle(server)
        return cell

    def killed_in_full_warm_up(self) -> Cell:
        """SIGKILL of a restarted engine while it captures all graphs before it serves."""
        cell = self._cell(self.killed_in_full_warm_up)
        with self._campaign.server(*FULL_WARM_UP) as server:
            os.kill(server.engine_pid, signal.SIGKILL)
            wait_for(lambda: is_capturing(server), "the replacement's warm-up", 300)
            os.kill(server.engine_pid, signal.SIGKILL)
            cell.after_kill = wait_for(lambda: answers(server.url), "an answer", 300)
            cell.detail = f"{server.metric('engine_restarts_total'):.0f} restarts"
            cell.idle, cell.load = until_idle(server), os.getloadavg()[0]
        return cell

    def killed_in_first_warm_up(self) -> Cell:
        """SIGKILL of the first engine while it captures all graphs, which ends the server with an error."""
        cell = self._cell(self.killed_in_first_warm_up)
        with self._campaign.server(*FULL_WARM_UP, wait=False) as server:
            wait_for(lambda: is_capturing(server), "the warm-up", 300)
            left = processes_of(server.process.pid)
            began = time.monotonic()
            os.kill(server.engine_pid, signal.SIGKILL)
            status = server.process.wait(60)
            wait_for(lambda: not any(map(runs, left)), "the processes' end", 60)
            cell.idle, cell.load = time.monotonic() - began, os.getloadavg()[0]
            cell.detail = f"exit status {status}"
            if not status:
                cell.faults.append("exit status 0")
        return cell

    def stopped_worker(self) -> Cell:
        """SIGSTOP of one of two API workers, with streams on both; it is replaced, or goes on if it is continued."""
        seconds, cell = self._size.stopped_seconds, self._cell(self.stopped_worker)
        with self._campaign.server("--http-workers", "2") as server, ExitStack() as streams:
            workers = workers_of(server)
            for _ in range(4):
                streams.enter_context(streaming(server.url))
            idle, began = resident(server.process.pid), time.monotonic()
            os.kill(workers[0], signal.SIGSTOP)
            with Watch(server.url, server.process.pid) as watch:
                while time.monotonic() - began < seconds and workers_of(server)[:1] == workers[:1]:
                    time.sleep(0.1)
            self._campaign.take(cell, watch, idle)
            stopped = time.monotonic() - began
            is_replaced = not runs(workers[0])
            if is_replaced:
                wait_for(lambda: len(workers_of(server)) == len(workers), "a replacement", 60)
            else:
                os.kill(workers[0], signal.SIGCONT)
            cell.detail = f"{'replaced' if is_replaced else 'continued'} after {stopped:.0f} s"
            if is_replaced != (seconds > SECONDS_UNTIL_REPLACED):
                cell.faults.append(f"the worker was {cell.detail}")
            for _ in range(8):  # on both workers
                if not answers(server.url):
                    cell.faults.append("a request failed afterwards")
            streams.close()
            cell.idle = until_idle(server)
        return cell

    def many_restarts(self) -> Cell:
        """Servers one after the other on one port, ended by SIGTERM or SIGKILL: nothing is left of any."""
        cell = self._cell(self.many_restarts)
        port, shared = free_port(), names_in(SHARED_MEMORY)
        temporary = self._campaign.folder / "tmp"
        temporary.mkdir()
        command = self._campaign.command("--port", str(port), "--http-workers", "2", "--warmup", "lazy")
        environment, url = ENVIRONMENT | {"TMPDIR": str(temporary)}, f"http://127.0.0.1:{port}"
        ready: list[float] = []
        slowest = 0.0
        for number in range(self._size.restarts):
            with (self._campaign.folder / "restarts.log").open("ab") as log:
                process = subprocess.Popen(command, stderr=log, env=environment)
            ready.append(wait_for(lambda: ask(url, "GET", "/ready") == 200, "readiness", 120))
            if not answers(url):
                cell.faults.append(f"start {number}: no answer")
            left, began = processes_of(process.pid), time.monotonic()
            process.send_signal(signal.SIGKILL if number % 2 else signal.SIGTERM)
            status = process.wait(60)
            wait_for(lambda left=left: not any(map(runs, left)), "the processes' end", 60)
            slowest = max(slowest, time.monotonic() - began)
            if status != (-signal.SIGKILL if number % 2 else 0):
                cell.faults.append(f"start {number}: exit status {status}")
            with suppress(TimeoutError):  # threads of a killed process may hold its files for a moment after its end
                wait_for(lambda: is_free(port), "the port", END_SECONDS)
            if not is_free(port):
                cell.faults.append(f"start {number}: the port is taken")
            # A killed server leaves its folder of responses, which the next start removes once it is a minute old.
            files = [name for name in names_in(temporary) if not (number % 2 or name.startswith("encore-responses-"))]
            if files or names_in(SHARED_MEMORY) - shared:
                cell.faults.append(f"start {number} left {files}, {names_in(SHARED_MEMORY) - shared}")
        cell.idle, cell.load = slowest, os.getloadavg()[0]
        cell.detail = f"{len(ready)} starts, ready after {min(ready):.1f} to {max(ready):.1f} s"
        if len(names_in(temporary)) > 60 / (min(ready) / 2) + 1:
            cell.faults.append(f"{len(names_in(temporary))} temporary folders were left")
        return cell

    def _cell(self, run: Callable[[], Cell]) -> Cell:
        return Cell(run.__name__, (run.__doc__ or "").strip())

    def cells(self, only: Sequence[str] = ()) -> Iterator[Cell]:
        """Do all runs, or those named `only`."""
        for run in (self.many_streams, self.kv_exhaustion, self.full_disk, self.killed_in_full_warm_up,
                    self.killed_in_first_warm_up, self.stopped_worker, self.many_restarts):  # fmt: skip
            if not only or run.__name__ in only:
                yield run()


def answers(url: str) -> bool:
    """Return whether a good request is answered."""
    return ask(url, "POST", "/v1/completions", GOOD) == 200


def limit_file_sizes() -> None:
    """Limit the files that this process and its children write to 64 KiB: beyond it writing fails."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))


def admin(url: str, path: str) -> tuple[int, str]:
    """Return status and body of a POST with the admin key."""
    request = urllib.request.Request(url + path, b"", {"Authorization": f"Bearer {ADMIN_KEY}"}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.read().decode()


def is_capturing(server: Serving) -> bool:
    """Return whether the engine captures graphs before it serves."""
    found = reasons(server)
    progress = json.loads(found) if found else {"ready": True}
    return not progress["ready"] and progress["warm"].get("pending", 0) > 0


def workers_of(server: Serving) -> list[int]:
    """Return the API workers' process ids."""
    return [pid for pid in server.child_pids() if "API worker" in command_of(pid)]


def names_in(folder: Path) -> set[str]:
    """Return the names of a folder's entries."""
    return {entry.name for entry in folder.iterdir()}


def is_free(port: int) -> bool:
    """Return whether a server can listen on a port, and nobody does."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return ask(f"http://127.0.0.1:{port}", "GET", "/health", timeout=1) is None
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: a tiny random one")
    parser.add_argument("--streams", type=int, default=Size.streams)
    parser.add_argument("--restarts", type=int, default=Size.restarts)
    parser.add_argument("--only", default="", help="names of runs, comma-separated")
    parser.add_argument("--table", type=Path, help="write the results there, as Markdown")
    found = parser.parse_args()
    rows, faults = [], []
    with tempfile.TemporaryDirectory() as folder:
        if found.model is None:
            write_tiny_model(Path(folder) / "model")
        campaign = Campaign(found.model or str(Path(folder) / "model"), 0.0, Path(folder), FLAGS)
        size = Size(streams=found.streams, restarts=found.restarts)
        for cell in Exhaustion(campaign, size).cells(tuple(filter(None, found.only.split(",")))):
            cell.check()
            rows.append(f"{cell.row()} {cell.detail} |")
            faults += [f"{cell.name}: {fault}" for fault in cell.faults]
            print(rows[-1], flush=True)
    if found.table is not None:
        command = f"python -m tests.soak.exhaustion {' '.join(sys.argv[1:])}".strip()
        text = page(rows, command, found.model or "a tiny random model", "An exhausted server", HEADER)
        found.table.write_text(text, encoding="utf-8")
    print("\n".join(faults), file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
