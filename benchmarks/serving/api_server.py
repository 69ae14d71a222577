"""The HTTP side of `encore serve` without a model: streams from an engine process that computes nothing.

    python -m benchmarks serving.api_server --http-workers 2 --step-ms 4 --clients 64,256 --json FILE
    python -m benchmarks serving.api_server --serve 8123 --model FOLDER     # only the server, until interrupted

The engine loop is replaced. API workers, pipes, pickling, detokenization and server-sent events are the server's.
The engine process emits tokens at a steady pace. With --step-ms 0 the streams arrive in bursts, which measures the
maximum throughput of an API worker. With the step time of a real engine, each token is an event and a write. The load
is `serving.http_streams`. --model names a folder with a tokenizer; the default is the tiny one of the tests.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks import harness
from benchmarks.serving.http_streams import COLUMNS, add_arguments, model_of, run_loads
from engine.config import EngineConfig
from engine.protocol.messages import (
    Abort,
    Command,
    Dead,
    EngineStats,
    Events,
    ModelInfo,
    Ready,
    Report,
    Snapshot,
    Stop,
    Submit,
)
from engine.protocol.request import EngineRequest, TokenEvent
from server.config import ServerConfig
from server.launch import run

NEEDS = "CPU"
START_SECONDS = 60.0
LOW, HIGH = 3, 90  # ids of the tokens given: ASCII characters of every byte-level tokenizer, so each one is text
INFO = ModelInfo(
    name="none", architecture="none", max_model_len=1 << 20, max_num_seqs=4096, vocab_size=1 << 20, eos_token_ids=(),
    device="none", dtype="none", weight_format="none", weight_version="none", logprobs_mode="processed",
    graph_buckets=(), page_size=16, num_pages=1, max_num_batched_tokens=1 << 20,
    enable_prefix_caching=False, async_scheduling=False,
)  # fmt: skip


class Pace:
    """Answers requests with ids in turn, one each a step, until they have as many as they asked for."""

    def __init__(self, step_seconds: float, first_seconds: float):
        self._step, self._first = step_seconds, first_seconds
        self._live: dict[str, tuple[EngineRequest, int]] = {}
        self._given = 0

    def obey(self, command: Command) -> None:
        """Begin or abort requests."""
        if isinstance(command, Submit):
            self._live |= {request.request_id: (request, 0) for request in command.requests}
            time.sleep(self._first * len(command.requests))  # what a prefill takes
        elif isinstance(command, Abort):
            for request_id in command.request_ids:
                self._live.pop(request_id, None)

    def step(self) -> Events:
        """Give each live request a token."""
        events = []
        for request_id, (request, count) in list(self._live.items()):
            event = TokenEvent(request_id=request_id, token_ids=[LOW + 7 * count % (HIGH - LOW)], graph_bucket=1)
            if count == 0:
                event.queue_time = 0.0
            count += 1
            self._live[request_id] = request, count
            if count == request.params.max_tokens:
                event.finish_reason = "length"
                del self._live[request_id]
            events.append(event)
        self._given += len(events)
        return Events(events)

    def serve(self, receive: Callable[[float], Command | None], send: Callable[[Report], None]) -> None:
        """Answer commands as an engine's loop does, until a Stop."""
        send(Ready(INFO))
        due = reported = time.monotonic()
        while True:
            command = receive(0.0 if self._live else 0.05)
            while command is not None:
                if isinstance(command, Stop):
                    return send(Dead(""))
                self.obey(command)
                command = receive(0.0)
            if self._live:
                send(self.step())
                due = max(due + self._step, time.monotonic() - self._step)  # a late step is made up for, not many
                time.sleep(max(0.0, due - time.monotonic()))
            if time.monotonic() - reported > 0.2:
                reported = time.monotonic()
                send(Snapshot(EngineStats(num_running=len(self._live), generation_tokens=self._given)))


def run_pace(
    step_seconds: float,
    first_seconds: float,
    config: EngineConfig,
    receive: Callable[[float], Command | None],
    send: Callable[[Report], None],
) -> None:
    """Serve in the engine's process."""
    Pace(step_seconds, first_seconds).serve(receive, send)


@contextmanager
def server(model: str, http_workers: int, step_ms: float, first_ms: float) -> Iterator[str]:
    """Run the server as a process and yield its address once it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", __spec__.name, f"--serve={port}", f"--model={model}",
               f"--http-workers={http_workers}", f"--step-ms={step_ms}", f"--first-ms={first_ms}"]  # fmt: skip
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server did not start (exit status {process.poll()})") from None
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    parser.add_argument("--model", help="a folder with a tokenizer (default: the tests' tiny one)")
    parser.add_argument("--http-workers", type=harness.count, default=1)
    parser.add_argument("--step-ms", type=float, default=4.0)
    parser.add_argument("--first-ms", type=float, default=0.0, help="what each new request adds to a step")
    parser.add_argument("--serve", type=harness.count, metavar="PORT", help="only serve, on this port")
    add_arguments(parser, prompt_tokens=16, vocab=f"{LOW},{HIGH}")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            from tests.conftest import write_tiny_model

            write_tiny_model(Path(folder))
        model = args.model or folder
        if args.serve:
            config = ServerConfig(
                engine=EngineConfig(model=model), port=args.serve, http_workers=args.http_workers, log_level="warning"
            )
            from benchmarks.serving.api_server import run_pace  # the engine process can't import it from __main__

            run(config, partial(run_pace, args.step_ms / 1e3, args.first_ms / 1e3))
            return 0
        report = harness.Report(__spec__.name, args, argv)
        with server(model, args.http_workers, args.step_ms, args.first_ms) as url:
            run_loads(url, model_of(url, ""), args, report)
    report.finish(COLUMNS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
