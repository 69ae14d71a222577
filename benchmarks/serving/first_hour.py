"""The first start of a fresh clone with an empty home: set-up, ready, first token, streams during and after captures.

    python -m benchmarks serving.first_hour --json FILE                       # set-up and downloads included: minutes
    python -m benchmarks serving.first_hour --venv .venv --busy 0,2           # with the packages of an environment

Clones the repository's last commit, and for each number of busy processes runs `./scripts/serve` with a HOME as set-up
left it, without variables that set threads. Set-up and the model's download are timed apart.

- model_seconds: from the start until the default model is in the cache. --cache FOLDER uses a folder that has it.
- ready_seconds: from then until /ready answers 200. first_token_seconds: from ready to the first streamed token.
- during and after, tokens/s: medians of streams while graphs are missing, for at most --seconds, and when none is.

Asked on two cores: first token at most 3 s after the model is there on quiet cores, 5 s beside two busy processes, and
streams during captures at least 0.9 of the speed after. The log of each server is in the JSON file.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness

NEEDS = "CPU"
ROOT = Path(__file__).resolve().parents[2]
COLUMNS = (
    "busy", "load_before", "load_after", "model_seconds", "ready_seconds", "first_token_seconds", "after_model_seconds",
    "asked_seconds", "during", "after", "during_of_after", "captured_seconds",
)  # fmt: skip
QUESTIONS = ("What is the capital of France?", "Why is the sky blue?", "Name three rivers.", "How do tides work?")
ASKED_SECONDS, ASKED_BUSY_SECONDS = 3.0, 5.0
GIVE_UP_SECONDS = 300.0
POLL_SECONDS = 0.02
HIDDEN = ("OMP_", "MKL_", "GOMP_", "KMP_", "ENCORE_", "XDG_", "PYTHON", "VIRTUAL_ENV", "HOME")
# A stand-in for the environment that scripts/setup makes, and the key by which it knows that nothing is left to do.
SHIM = '#!/bin/sh\nPYTHONPATH="{clone}" exec "{python}" -m server.cli "$@"\n'
COMPILE = "from engine.kernels.cpu_library import cpu_kernels_loaded; cpu_kernels_loaded()"  # as scripts/setup does
READY_KEY = "printf '%s' \"cpu $(cat pyproject.toml scripts/setup | cksum)\" > .venv/.ready-serve"


class Server:
    """`./scripts/serve` of a clone. `log`: its lines, with the seconds since the start."""

    def __init__(self, clone: Path, environment: dict[str, str]):
        self.started = time.perf_counter()
        self.log: list[str] = []
        self._process = subprocess.Popen(
            ["./scripts/serve", "--port", "0"], cwd=clone, env=environment, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()
        self.host, self.port = self._address()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.log.append(f"{time.perf_counter() - self.started:.2f} {line.rstrip()}")

    def _address(self) -> tuple[str, int]:
        deadline = time.perf_counter() + GIVE_UP_SECONDS
        while time.perf_counter() < deadline and self._process.poll() is None:
            for line in self.log:
                if found := re.search(r"http://([\d.]+):(\d+)", line):
                    return found[1], int(found[2])
            time.sleep(POLL_SECONDS)
        self.stop()
        raise SystemExit("the server did not listen:\n" + "\n".join(self.log))

    def get(self, path: str) -> tuple[int, str]:
        """Return status and body; status 0 while nothing listens."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=GIVE_UP_SECONDS)
        with contextlib.closing(connection):
            try:
                connection.request("GET", path)
                answer = connection.getresponse()
                return answer.status, answer.read().decode()
            except ConnectionError:
                return 0, ""

    def wait_ready(self) -> None:
        while self.get("/ready")[0] != 200:
            if time.perf_counter() - self.started > GIVE_UP_SECONDS:
                self.stop()
                raise SystemExit("the server was not ready:\n" + "\n".join(self.log))
            time.sleep(POLL_SECONDS)

    def warm_ratio(self) -> float:
        """Return the share of the planned graphs that are captured."""
        found = re.search(r"^encore_graph_warm_ratio(?:\{[^}]*\})? (\S+)$", self.get("/metrics")[1], re.MULTILINE)
        if found is None:
            raise LookupError("/metrics has no encore_graph_warm_ratio")
        return float(found[1])

    def stream(self, question: str, tokens: int) -> list[float]:
        """Return the times at which the text of a streamed answer came."""
        body = {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": tokens, "stream": True, "ignore_eos": True,
        }  # fmt: skip
        times = []
        connection = http.client.HTTPConnection(self.host, self.port, timeout=GIVE_UP_SECONDS)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {answer.read().decode()}")
            for line in answer:
                if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                    times.append(time.perf_counter())
        return times

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def speed(times: Sequence[float]) -> float:
    """Return the texts per second of one stream, after its first."""
    return (len(times) - 1) / (times[-1] - times[0])


def measure(clone: Path, environment: dict[str, str], cache: Path, tokens: int, seconds: float) -> dict[str, Any]:
    """Start a server, stream while it captures and after, and stop it."""
    began = time.time()
    server = Server(clone, environment)
    try:
        server.wait_ready()
        ready = time.perf_counter()
        first = server.stream(QUESTIONS[0], tokens)
        model = max([one.stat().st_mtime for one in cache.rglob("*.gguf")], default=began) - began
        model = max(0.0, model)
        during, after, number = [speed(first)], [], 0  # graphs are missing during the first stream too
        streamed = time.perf_counter()
        while server.warm_ratio() < 1 and time.perf_counter() < streamed + seconds:
            number += 1
            during.append(speed(server.stream(QUESTIONS[number % len(QUESTIONS)], tokens)))
        waited = time.perf_counter()
        while server.warm_ratio() < 1:
            if time.perf_counter() > waited + GIVE_UP_SECONDS:
                raise SystemExit("graphs are missing:\n" + "\n".join(server.log))
            time.sleep(0.25)
        captured = time.perf_counter()
        for number in range(max(3, len(during))):
            after.append(speed(server.stream(QUESTIONS[number % len(QUESTIONS)], tokens)))
        row: dict[str, Any] = {
            "model_seconds": model,
            "ready_seconds": ready - server.started - model,
            "first_token_seconds": first[0] - ready,
            "after_model_seconds": first[0] - server.started - model,
            "captured_seconds": captured - ready,
            "during": statistics.median(during),
            "after": statistics.median(after),
        }
        row["during_of_after"] = row["during"] / row["after"]
        return {name: round(value, 3) for name, value in row.items()} | {"streams": len(during), "log": server.log}
    finally:
        server.stop()


def clone_to(folder: Path, venv: Path | None, environment: dict[str, str]) -> tuple[Path, float]:
    """Clone the last commit and set it up; return the clone and the seconds of set-up."""
    clone = folder / "encore"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, clone], check=True)
    started = time.perf_counter()
    if venv is None:
        subprocess.run(["./scripts/setup", "serve"], cwd=clone, env=environment, check=True)
    else:
        commands = clone / ".venv" / "bin"
        commands.mkdir(parents=True)
        (commands / "encore").write_text(SHIM.format(clone=clone, python=venv.absolute() / "bin" / "python"))
        (commands / "encore").chmod(0o755)
        subprocess.run(["sh", "-c", READY_KEY], cwd=clone, check=True)
        subprocess.run([venv.absolute() / "bin" / "python", "-c", COMPILE], cwd=clone, env=environment, check=True)
    return clone, time.perf_counter() - started


@contextlib.contextmanager
def new_home(folder: Path, cache: Path | None, left: str | None = None) -> Iterator[tuple[dict[str, str], Path]]:
    """Make a home with what set-up has `left` in another; return a user's environment in it, and the models' folder."""
    with tempfile.TemporaryDirectory(dir=folder) as home:
        if left is not None:
            shutil.copytree(left, home, dirs_exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(HIDDEN)}
        environment |= {"HOME": home, "PYTHONUNBUFFERED": "1"}
        if cache is not None:
            environment["ENCORE_CACHE"] = str(cache.absolute())
        yield environment, cache or Path(home) / ".cache" / "encore"


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    parser.add_argument("--venv", type=Path, help="an environment with Encore's packages, in place of set-up")
    parser.add_argument("--cache", type=Path, help="a folder that has the default model, in place of its download")
    parser.add_argument("--busy", type=harness.counts_from_zero, default=[0, 2], help="busy processes, a run for each")
    parser.add_argument("--tokens", type=harness.count, default=64, help="of each stream")
    parser.add_argument(
        "--seconds", type=harness.positive, default=20.0, help="of streams during the captures, at most"
    )
    args: argparse.Namespace = parser.parse_args(argv)
    if args.venv is not None and not (args.venv / "bin" / "python").exists():
        parser.error(f"--venv {args.venv} has no bin/python")
    report = harness.Report(__spec__.name, args, argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with new_home(folder, args.cache) as (environment, _):
            clone, setup = clone_to(folder, args.venv, environment)
            for busy in args.busy:
                homes = new_home(folder, args.cache, environment["HOME"])
                with homes as (environment_of_run, cache), harness.busy_processes(busy):
                    before = os.getloadavg()[0]
                    row = measure(clone, environment_of_run, cache, args.tokens, args.seconds)
                    loads = {"load_before": round(before, 2), "load_after": round(os.getloadavg()[0], 2)}
                    asked = ASKED_BUSY_SECONDS if busy else ASKED_SECONDS
                    report.add({"busy": busy} | loads | row | {"asked_seconds": asked})
    report.finish(COLUMNS, setup_seconds=round(setup, 1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
