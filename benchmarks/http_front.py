"""The HTTP side without a model: `encore serve` whose engine process gives tokens at a steady pace and computes none.

    .venv/bin/python -m benchmarks.http_front --model FOLDER --port 8123 --http-workers 2 --step-ms 4
    .venv/bin/python -m benchmarks.http_streams http://127.0.0.1:8123 --clients 64,256 --vocab 3,300

Everything but the loop is the server's own: fronts, pipes, pickling, detokenising, SSE. `--model` names the tokenizer;
a folder of transformers' with a small vocabulary will do. With steps of 0 ms the streams come in lumps: what a front
can take at most. With the steps of a real engine, each token is an event and a write of its own.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial

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

LOW, HIGH = 3, 300  # ids of the tokens given, which every tokenizer has
INFO = ModelInfo(
    name="none", architecture="none", max_model_len=1 << 20, max_num_seqs=4096, vocab_size=1 << 20, eos_token_ids=(),
    device="none", dtype="none", weight_format="none", weight_version="none", logprobs_mode="processed",
    graph_buckets=(),
)  # fmt: skip


class Pace:
    """Answers requests with ids in turn, one each a step, until they have as many as they asked for."""

    def __init__(self, step_seconds: float, first_seconds: float):
        self._step, self._first = step_seconds, first_seconds
        self._live: dict[str, tuple[EngineRequest, int]] = {}
        self._given = 0

    def obey(self, command: Command) -> None:
        """Take requests on, or drop them."""
        if isinstance(command, Submit):
            self._live |= {request.request_id: (request, 0) for request in command.requests}
            time.sleep(self._first * len(command.requests))  # what a prefill takes
        elif isinstance(command, Abort):
            for request_id in command.request_ids:
                self._live.pop(request_id, None)

    def step(self) -> Events:
        """A token for everyone."""
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
        """As a loop's: until a Stop."""
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
    """What the engine's process runs."""
    Pace(step_seconds, first_seconds).serve(receive, send)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="where the tokenizer is")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--http-workers", type=int, default=1)
    parser.add_argument("--step-ms", type=float, default=4.0)
    parser.add_argument("--first-ms", type=float, default=0.0, help="what each new request adds to a step")
    found = parser.parse_args()
    config = ServerConfig(
        engine=EngineConfig(model=found.model), port=found.port, http_workers=found.http_workers, log_level="warning"
    )
    run(config, partial(run_pace, found.step_ms / 1e3, found.first_ms / 1e3))
    return 0


if __name__ == "__main__":
    sys.exit(main())
