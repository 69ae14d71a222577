"""Messages per second through the EngineRouter, and the CPU time that it spends per message.

    python -m benchmarks serving.router [--messages 5000] [--prompts 512,8192] [--json FILE]

The engine process computes nothing: it answers each Submit with one event. Client processes submit at full speed.
`commands` counts messages in both directions of this exchange. In the second part the engine sends steps of 64 tokens,
shared by all clients.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from benchmarks import harness
from benchmarks.serving.api_server import INFO
from engine.client.router import EngineRouter, RouterTransport
from engine.client.transport import ProcessTransport
from engine.config import EngineConfig
from engine.protocol.messages import Command, Dead, Events, Ready, Report, Stop, Submit
from engine.protocol.request import EngineRequest, SamplingParams, TokenEvent

NEEDS = "CPU"
ROWS = 64  # tokens per step
STREAM = "stream"  # request ids that end with it ask for steps
WAIT_SECONDS = 300.0


def run_echo(config: EngineConfig, receive: Callable[[float], Command | None], send: Callable[[Report], None]) -> None:
    """Answer each Submit; send steps once every client has asked for them."""
    streams: list[str] = []
    send(Ready(INFO))
    while not isinstance(command := receive(1.0), Stop):
        if not isinstance(command, Submit):
            continue
        for request in command.requests:
            if not request.request_id.endswith(STREAM):
                send(Events([TokenEvent(request_id=request.request_id, finish_reason="stop")]))
                continue
            streams.append(request.request_id)
            clients = request.priority
            if len(streams) == clients:
                for _ in range(request.seed):
                    send(Events([_token(streams[row % clients]) for row in range(ROWS)]))
                send(Events([TokenEvent(request_id=name, finish_reason="stop") for name in streams]))
                streams.clear()
    send(Dead(""))


def _token(name: str) -> TokenEvent:
    return TokenEvent(request_id=name, token_ids=[7], weight_version="v", graph_bucket=ROWS)


def run_client(pipe: Connection, control: Connection, client: int, clients: int, messages: int, prompt: int) -> None:
    """Send commands, then ask for steps, each when `control` says so; report the seconds of each part."""
    ended, ready = threading.Semaphore(0), threading.Event()

    def on_report(report: Report) -> None:
        if isinstance(report, Ready):
            ready.set()
        elif isinstance(report, Events):
            for event in report.events:
                if event.finish_reason is not None:
                    ended.release()

    transport = RouterTransport(pipe)
    transport.start(on_report)
    if not ready.wait(WAIT_SECONDS):
        raise TimeoutError("the engine is not ready")
    ids = list(range(1000, 1000 + prompt))

    def request(name: str, seed: int = 0) -> Submit:
        one = EngineRequest(
            request_id=f"{client}.{name}", prompt_token_ids=ids, params=SamplingParams(), priority=clients, seed=seed
        )
        return Submit([one])

    control.send("ready")
    control.recv()
    for number in range(messages):
        transport.send(request(str(number)))
    for _ in range(messages):
        ended.acquire(timeout=WAIT_SECONDS)
    control.send("done")
    control.recv()
    transport.send(request(STREAM, messages))
    ended.acquire(timeout=WAIT_SECONDS)
    control.send("done")
    control.recv()


def measure(clients: int, messages: int, prompt: int) -> list[dict[str, Any]]:
    """Return a row for each part."""
    router = EngineRouter(ProcessTransport(EngineConfig(model="none"), routed=True, run=run_echo))
    router.start(lambda report: None)
    context = multiprocessing.get_context("spawn")
    controls, processes = [], []
    for client in range(clients):
        pipe, (control, child_control) = router.connect(client), context.Pipe()
        process = context.Process(
            target=run_client, args=(pipe, child_control, client, clients, messages, prompt), daemon=True
        )
        process.start()
        pipe.close()
        controls.append(control)
        processes.append(process)
    rows = []
    for control in controls:
        control.recv()
    for part, per_client in (("commands and answers", 2), ("steps", 1)):
        began, cpu = time.perf_counter(), time.process_time()
        for control in controls:
            control.send("go")
        for control in controls:
            control.recv()
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        count = messages * per_client * clients
        rows.append({"part": part, "messages/s": count / seconds, "router CPU us/message": 1e6 * cpu / count})
    for control in controls:
        control.send("end")
    for process in processes:
        process.join()
    router.stop(10.0)
    return rows


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    parser.add_argument("--clients", type=harness.counts, default=[1, 2], help="numbers of clients (1,2)")
    parser.add_argument("--messages", type=harness.count, default=5000, help="commands, and steps, per client (5000)")
    parser.add_argument("--prompts", type=harness.counts, default=[512, 8192], help="prompt tokens (512,8192)")
    args = parser.parse_args(argv)
    report = harness.Report(__spec__.name, args, argv)
    for prompt, clients in itertools.product(args.prompts, args.clients):
        for row in measure(clients, args.messages, prompt):
            report.add({"prompt tokens": prompt, "clients": clients} | row)
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
