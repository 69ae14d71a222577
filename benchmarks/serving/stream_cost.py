"""CPU time that an API worker spends per 1,000 streamed tokens, for each interface.

    python -m benchmarks serving.stream_cost --streams 300 --tokens 64 --json FILE
    python -m benchmarks serving.stream_cost --interfaces chat,responses --step-ms 500

The engine process computes nothing (`serving.api_server`) and gives each stream a token a step. The worker's CPU time
is read from /proc, so other load on the machine changes it little. Counted are the tokens between the moment at which
all streams have begun and the moment at which the first one ends: requests and their ends are left out. --model names a
folder with a tokenizer; the default is the tiny one of the tests. Needs Linux.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmarks import harness
from benchmarks.serving.api_server import server
from benchmarks.serving.http_streams import model_of

NEEDS = "CPU"
COLUMNS = ("interface", "streams", "tokens", "cpu_ms_per_1000_tokens", "of_it_kernel_ms")
STALLED_SECONDS = 120.0
PAUSE_SECONDS = 0.05  # of the client between two reads, or each write of the server would also wake it up
MESSAGES = [{"role": "user", "content": "hello"}]


class Interface(NamedTuple):
    """An interface that streams: its route, a request without `model`, and the bytes that only a text event has."""

    path: str
    body: dict[str, Any]
    limit: str  # the field that limits the tokens
    event: bytes


INTERFACES = {
    "completions": Interface("/v1/completions", {"prompt": "hello"}, "max_tokens", b'"choices":[{"index":0,"text":'),
    "chat": Interface("/v1/chat/completions", {"messages": MESSAGES}, "max_tokens", b'"delta":{"content":"'),
    "messages": Interface("/v1/messages", {"messages": MESSAGES}, "max_tokens", b"event: content_block_delta"),
    "responses": Interface(
        "/v1/responses", {"input": "hello", "store": False}, "max_output_tokens", b"event: response.output_text.delta"
    ),
}  # fmt: skip


class Stream:
    """One connection with a request on it, and the number of text events that have come."""

    def __init__(self, address: tuple[str, int], request: bytes, event: bytes):
        self._event, self._rest = event, b""
        self.connection = socket.create_connection(address)
        self.connection.sendall(request)
        self.events = 0

    def receive(self) -> bool:
        """Count what came; return whether the stream goes on. Raises RuntimeError for an answer other than 200."""
        data = self.connection.recv(1 << 18)
        if not self.events and data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(data.decode("utf-8", "replace")[:500])
        seen = self._rest + data
        self.events += seen.count(self._event)
        self._rest = seen[1 - len(self._event) :]
        return bool(data) and not seen.endswith(b"\r\n0\r\n\r\n")


def cpu_seconds(pid: int) -> tuple[float, float]:
    """Return the CPU seconds of a process and all its threads so far: in its own code, and in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / ticks, int(fields[12]) / ticks


def process_of(port: int) -> int:
    """Return the id of the server's process, which is a child of this one and has the port in its arguments."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for child in children:
        if f"--serve={port}\0" in Path(f"/proc/{child}/cmdline").read_text():
            return int(child)
    raise LookupError(f"no server on port {port}")


def measure(url: str, interface: Interface, streams: int, tokens: int) -> dict[str, Any]:
    """Run `streams` streams at once and return the CPU time per 1,000 tokens."""
    parts = urlsplit(url)
    address = parts.hostname or "127.0.0.1", parts.port or 80
    pid = process_of(address[1])
    body = json.dumps(
        interface.body | {"model": model_of(url, ""), "stream": True, interface.limit: tokens, "temperature": 0}
    ).encode()
    head = (
        f"POST {interface.path} HTTP/1.1\r\nHost: {address[0]}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    opened = [Stream(address, head.encode() + body, interface.event) for _ in range(streams)]
    begun: tuple[float, float] | None = None
    ended: tuple[float, float] | None = None
    first = counted = 0
    with selectors.DefaultSelector() as selector:
        for stream in opened:
            selector.register(stream.connection, selectors.EVENT_READ, stream)
        while selector.get_map():
            if not selector.select(STALLED_SECONDS):
                raise TimeoutError(f"nothing came for {STALLED_SECONDS:g} s")
            time.sleep(PAUSE_SECONDS)
            for key, _ in selector.select(0):
                if not key.data.receive():
                    if ended is None:
                        ended, counted = cpu_seconds(pid), sum(one.events for one in opened) - first
                    selector.unregister(key.fileobj)
                    key.data.connection.close()
            if begun is None and all(stream.events for stream in opened):
                begun, first = cpu_seconds(pid), sum(stream.events for stream in opened)
    if begun is None or ended is None or counted < streams * tokens / 4:
        raise RuntimeError(f"only {counted} tokens came while all streams ran: ask for more --tokens")
    own, kernel = (1e6 * (after - before) / counted for before, after in zip(begun, ended, strict=True))
    return {"streams": streams, "tokens": counted, "cpu_ms_per_1000_tokens": round(own + kernel, 2),
            "of_it_kernel_ms": round(kernel, 2)}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    parser.add_argument("--interfaces", type=harness.names(INTERFACES), default=list(INTERFACES))
    parser.add_argument("--streams", type=harness.count, default=300)
    parser.add_argument("--tokens", type=harness.count, default=64, help="of each stream")
    parser.add_argument("--step-ms", type=harness.positive, default=250.0)
    parser.add_argument("--model", help="a folder with a tokenizer (default: the tests' tiny one)")
    args = parser.parse_args(argv)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    report = harness.Report(__spec__.name, args, argv)
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            from tests.conftest import write_tiny_model

            write_tiny_model(Path(folder))
        with server(args.model or folder, 1, args.step_ms, 0.0) as url:
            for name in args.interfaces:
                report.add({"interface": name, **measure(url, INTERFACES[name], args.streams, args.tokens)})
    report.finish(COLUMNS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
