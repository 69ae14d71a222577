"""HTTP streaming: tokens/s, first-token and inter-token times with N clients of an OpenAI-compatible server.

    python -m benchmarks serving.http_streams http://127.0.0.1:8000 --clients 1,16,64,256 --processes 4 --json FILE
    python -m benchmarks serving.http_streams --ceiling --clients 64,256   # what this client itself can take

Drives any `/v1/completions` (ours, `vllm serve`, SGLang) with random prompts of token ids; the API key, where the
server needs one, is read from OPENAI_API_KEY. A client is a raw socket on which it counts the events of its stream;
JSON is read once a stream, from the last chunk's usage. Clients are spread over several processes. Needs
neither PyTorch nor the engine, except to describe the machine in the file of --json.

The model needs a tokenizer, such as `vocabulary.py` writes: without one no token is text, and nothing arrives before
the end of a stream.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import selectors
import socket
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

from benchmarks import harness

NEEDS = "CPU"
COLUMNS = ("clients", "tokens_per_second", "first_token_ms.median", "first_token_ms.p99", "inter_token_ms.median",
           "inter_token_ms.p99", "request_ms.median", "client.busiest")  # fmt: skip
EVENT = b'data: {"'  # within a JSON string the quote would be escaped, so this is never text of the model's
USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
KEPT = 4096  # bytes of a stream's end, in which its usage stands
CEILING_TOKENS = 256
CEILING_EVENT = (
    b'data: {"id":"cmpl-0","object":"text_completion","created":1700000000,"model":"ceiling","choices":'
    b'[{"index":0,"text":" token","logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
)
CEILING_LAST = b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\ndata: [DONE]\n\n' % CEILING_TOKENS


class Stream:
    """One client: a connection, kept from request to request, and the times of what came on it."""

    def __init__(self, address: tuple[str, int], bodies: list[bytes], head: bytes):
        self._connection = socket.create_connection(address)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.setblocking(False)
        self._bodies, self._head = bodies, head
        self.first: list[float] = []
        self.gaps: list[float] = []
        self.whole: list[float] = []
        self.tokens = self.events = 0
        self.failures: list[str] = []

    def fileno(self) -> int:
        """For the selector."""
        return self._connection.fileno()

    def begin(self) -> bool:
        """Send the next request; whether there was one."""
        if not self._bodies:
            self._connection.close()
            return False
        body = self._bodies.pop()
        self._sent = time.perf_counter()
        self._last = 0.0
        self._end, self._rest = b"", b""
        self._connection.setblocking(True)
        self._connection.sendall(self._head % len(body) + body)
        self._connection.setblocking(False)
        return True

    def receive(self) -> bool:
        """Take what came; whether the stream goes on."""
        data = self._connection.recv(262144)
        now = time.perf_counter()
        if not data:
            return self._fail("the server closed the connection")
        seen = self._rest + data
        self._rest = seen[1 - len(EVENT) :]
        count = seen.count(EVENT)
        self._end = (self._end + data)[-KEPT:]
        is_over = self._end.endswith(b"0\r\n\r\n") and b"[DONE]" in self._end
        if is_over:
            count -= b'"choices":[]' in self._end or b'"choices": []' in self._end
        if count:
            self._count(count, now)
        if not is_over and not self._last and not self._end.startswith(b"HTTP/1.1 200"):
            return self._fail(self._end.decode("utf-8", "replace")[:500])
        if is_over:
            self._finish(now)
        return not is_over

    def _count(self, count: int, now: float) -> None:
        self.events += count
        if self._last:
            self.gaps.append(now - self._last)
        else:
            self.first.append(now - self._sent)
        self.gaps += [0.0] * (count - 1)  # they came together, whatever their server did between them
        self._last = now

    def _finish(self, now: float) -> None:
        self.whole.append(now - self._sent)
        found = USAGE.findall(self._end)
        if found:
            self.tokens += int(found[-1])
        else:
            self.failures.append(f"no usage in the end of a stream: {self._end[-300:]!r}")

    def _fail(self, why: str) -> bool:
        self.failures.append(why)
        self._bodies.clear()
        return False


def drive(
    address: tuple[str, int],
    path: str,
    bodies: list[list[bytes]],
    delays: list[float],
    key: str,
    pipe: Connection,
) -> None:
    """One process: a stream per list of bodies, begun `delays` seconds after the pipe says so; sends its times back.

    `delays` ascend.
    """
    auth = f"Authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {address[0]}\r\n{auth}Content-Type: application/json\r\n"
        "Content-Length: %d\r\n\r\n"
    ).encode()
    streams = [Stream(address, one, head) for one in bodies]
    pipe.send("ready")
    pipe.recv()
    cpu, began = time.process_time(), time.perf_counter()
    with selectors.DefaultSelector() as selector:
        waiting = list(zip(delays, streams, strict=True))[::-1]
        left = len(streams)
        while left:
            while waiting and time.perf_counter() >= began + waiting[-1][0]:
                _, stream = waiting.pop()
                stream.begin()
                selector.register(stream, selectors.EVENT_READ)
            timeout = max(0.0, began + waiting[-1][0] - time.perf_counter()) if waiting else None
            for ready, _ in selector.select(timeout):
                stream = ready.fileobj
                if not stream.receive():
                    selector.unregister(stream)
                    if stream.begin():
                        selector.register(stream, selectors.EVENT_READ)
                    else:
                        left -= 1
    ended = time.perf_counter()
    pipe.send({
        "ended": ended, "cpu": time.process_time() - cpu,
        **{name: sum((getattr(stream, name) for stream in streams), [])
           for name in ("first", "gaps", "whole", "failures")},
        **{name: sum(getattr(stream, name) for stream in streams) for name in ("tokens", "events")},
    })  # fmt: skip


def load(
    url: str,
    clients: int,
    requests: int,
    body: dict[str, Any],
    prompt_tokens: int,
    vocab: tuple[int, int],
    processes: int,
    seed: int,
    key: str = "",
    over: float = 0.0,
) -> dict[str, Any]:
    """`requests` streams by `clients` at a time; what came, when, and what this client's own processes spent on it.

    The clients begin evenly spread over `over` seconds.
    """
    parts = urlsplit(url)
    address, path = (parts.hostname or "127.0.0.1", parts.port or 80), parts.path.rstrip("/") + "/v1/completions"
    rng = random.Random(seed)
    shares: list[list[bytes]] = [[] for _ in range(clients)]
    for number in range(requests):
        prompt = [rng.randrange(*vocab) for _ in range(prompt_tokens)]
        shares[number % clients].append(json.dumps(body | {"prompt": prompt}).encode())
    delays = [over * number / clients for number in range(clients)]
    count = min(processes, clients)
    context = multiprocessing.get_context("fork")
    pipes, workers = [], []
    for number in range(count):
        ours, theirs = context.Pipe()
        mine = shares[number::count], delays[number::count]
        worker = context.Process(target=drive, args=(address, path, *mine, key, theirs), daemon=True)
        worker.start()
        theirs.close()
        pipes.append(ours)
        workers.append(worker)
    for pipe in pipes:
        pipe.recv()
    began = time.perf_counter()
    for pipe in pipes:
        pipe.send("go")
    found = [pipe.recv() for pipe in pipes]
    for worker in workers:
        worker.join()
    failures = [failure for one in found for failure in one["failures"]]
    if failures:
        raise SystemExit(f"{len(failures)} of {requests} streams failed, the first with: {failures[0]}")
    seconds = max(one["ended"] for one in found) - began
    return summary(found, clients, requests, count, seconds)


def summary(found: list[dict[str, Any]], clients: int, requests: int, processes: int, seconds: float) -> dict[str, Any]:
    """The figures of a run from what its processes measured."""
    first, gaps, whole = (sorted(time for one in found for time in one[name]) for name in ("first", "gaps", "whole"))
    tokens = sum(one["tokens"] for one in found)
    cpu = sum(one["cpu"] for one in found)
    return {
        "clients": clients, "requests": requests, "tokens": tokens, "events": sum(one["events"] for one in found),
        "seconds": round(seconds, 3), "tokens_per_second": round(tokens / seconds, 1),
        "first_token_ms": {"median": harness.quantile_ms(first, 0.5), "p99": harness.quantile_ms(first, 0.99)},
        "inter_token_ms": {"mean": round(1e3 * statistics.fmean(gaps), 3) if gaps else None,
                           "median": harness.quantile_ms(gaps, 0.5), "p99": harness.quantile_ms(gaps, 0.99)},
        "request_ms": {"median": harness.quantile_ms(whole, 0.5), "p99": harness.quantile_ms(whole, 0.99)},
        "client": {"processes": processes, "cpu_us_per_token": round(1e6 * cpu / max(tokens, 1), 2),
                   "busiest": round(max(one["cpu"] for one in found) / seconds, 3)},
    }  # fmt: skip


def ceiling_server(listener: socket.socket) -> None:
    """Answers every request with events made beforehand, one write each, without reading what it asks for."""
    selector = selectors.DefaultSelector()
    listener.setblocking(False)
    selector.register(listener, selectors.EVENT_READ)
    chunk = b"%x\r\n%b\r\n" % (len(CEILING_EVENT), CEILING_EVENT)
    last = b"%x\r\n%b\r\n0\r\n\r\n" % (len(CEILING_LAST), CEILING_LAST)
    left: dict[socket.socket, int] = {}
    while True:
        for ready, _ in selector.select(0 if left else None):
            if ready.fileobj is listener:
                try:
                    connection, _ = listener.accept()
                except BlockingIOError:  # another server took it
                    continue
                connection.setblocking(True)
                selector.register(connection, selectors.EVENT_READ)
            elif not (data := ready.fileobj.recv(1 << 20)):
                selector.unregister(ready.fileobj)
                ready.fileobj.close()
            elif data.endswith(b"}"):
                ready.fileobj.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                left[ready.fileobj] = CEILING_TOKENS
        for connection in list(left):
            left[connection] -= 1
            if left[connection]:
                connection.sendall(chunk)
            else:
                connection.sendall(chunk + last)
                del left[connection]


def model_of(url: str, key: str) -> str:
    """The first model that the server names."""
    request = urllib.request.Request(url + "/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)["data"][0]["id"]


@contextmanager
def ceiling(processes: int) -> Iterator[str]:
    """Run servers that only write, on one port, and yield their address."""
    context = multiprocessing.get_context("fork")
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        servers = [context.Process(target=ceiling_server, args=(listener,), daemon=True) for _ in range(processes)]
        for server in servers:
            server.start()
        try:
            yield "http://127.0.0.1:{1}".format(*listener.getsockname())
        finally:
            for server in servers:
                server.terminate()
                server.join()


def add_arguments(parser: argparse.ArgumentParser, prompt_tokens: int = 512, vocab: str = "100,100000") -> None:
    """Add the arguments that describe a load."""
    parser.add_argument("--clients", type=harness.counts, default=[1, 16, 64, 256], metavar="N,N")
    parser.add_argument("--requests-per-client", type=harness.count, default=4)
    parser.add_argument("--prompt-tokens", type=harness.count, default=prompt_tokens)
    parser.add_argument("--output-tokens", type=harness.count, default=256)
    parser.add_argument(
        "--over", type=harness.positive, metavar="SECONDS", help="over which clients begin; default: at once"
    )
    parser.add_argument("--vocab", type=id_range, default=vocab, metavar="LOW,HIGH", help="ids of the prompts")
    parser.add_argument("--processes", type=harness.count, default=max(1, (os.cpu_count() or 2) // 4))
    parser.add_argument("--rounds", type=harness.count, default=1, help="runs of each number of clients, all reported")
    parser.add_argument("--warm-up", type=int, default=1, help="runs of each number of clients that are not counted")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the prompts: new ones unless given")


def id_range(text: str) -> tuple[int, int]:
    """Convert LOW,HIGH to both token ids; the second is exclusive."""
    found = harness.counts(text)
    if len(found) != 2 or found[0] >= found[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not LOW,HIGH with LOW below HIGH")
    return found[0], found[1]


def run_loads(url: str, model: str, args: argparse.Namespace, report: harness.Report, key: str = "") -> None:
    """Run the loads that `args` describe (see add_arguments) and add a row for each to the report."""
    body = {
        "model": model, "max_tokens": args.output_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    for clients in args.clients:
        for number in range(-args.warm_up, args.rounds):
            seed = args.seed + 1009 * clients + number
            requests = clients * (1 if number < 0 else args.requests_per_client)
            row = load(
                url,
                clients,
                requests,
                body,
                args.prompt_tokens,
                args.vocab,
                args.processes,
                seed,
                key,
                args.over or 0.0,
            )
            if number >= 0:
                report.add(row)


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    parser.add_argument("url", nargs="?", help="the server, such as http://127.0.0.1:8000")
    parser.add_argument("--ceiling", action="store_true", help="measure this client on a server that only writes")
    parser.add_argument("--model", help="default: the first one that the server lists")
    add_arguments(parser)
    args = parser.parse_args(argv)
    if bool(args.url) == args.ceiling:
        parser.error("give either the server's address or --ceiling")
    key = os.environ.get("OPENAI_API_KEY", "")
    report = harness.Report(__spec__.name, args, argv)
    if args.ceiling:
        with ceiling(args.processes) as url:
            run_loads(url, "ceiling", args, report)
    else:
        run_loads(args.url, args.model or model_of(args.url, key), args, report, key)
    report.finish(COLUMNS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
