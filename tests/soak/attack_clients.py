"""Clients that attack a server over HTTP. Each runs for some seconds in a process of its own.

    python -m tests.soak.attack_clients NAME URL SECONDS

Prints one line of JSON: how many requests or connections it made, and the statuses of the answers that it read.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any
from urllib.parse import urlsplit

BODY_BYTES = 8 * 2**20 - 4096  # just below --max-body-bytes
SENTENCE = "the quick brown fox jumps over the lazy dog "
LONG_PROMPT = SENTENCE * 100
Bodies = list[tuple[str, bytes]]  # path, content
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


class Attack:
    """One attack on a server, until `seconds` are over."""

    def __init__(self, url: str, seconds: float):
        where = urlsplit(url)
        self.address = (where.hostname, where.port)
        self.end = time.monotonic() + seconds
        self.counts: Counter[str] = Counter()

    @property
    def is_over(self) -> bool:
        """Whether the attack's time is over."""
        return time.monotonic() > self.end

    def connect(self, receive_bytes: int | None = None) -> socket.socket:
        """Return a connection. A small `receive_bytes` makes a client that takes nothing without reading."""
        found = socket.socket()
        if receive_bytes is not None:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        found.settimeout(30)
        found.connect(self.address)
        self.counts["connections"] += 1
        return found

    def post(self, path: str, content: bytes) -> None:
        """Send a request, read its answer and count its status."""
        with self.connect() as connection, suppress(ConnectionError, TimeoutError):
            connection.sendall(head(path, len(content)) + content)
            connection.settimeout(max(1.0, self.end - time.monotonic()))
            first = connection.recv(65536)
            self.counts[first[9:12].decode() or "closed"] += 1
            while connection.recv(1 << 20):
                pass

    def repeat(self, bodies: list[tuple[str, bytes]], clients: int = 2) -> None:
        """Send these bodies again and again, from several clients."""

        def send(first: int) -> None:
            number = first
            while not self.is_over:
                self.post(*bodies[number % len(bodies)])
                number += 1

        threads = [threading.Thread(target=send, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def trickle(self, connections: list[socket.socket], piece: bytes) -> None:
        """Send `piece` over each connection now and then, until the time is over."""
        while not self.is_over:
            for connection in connections:
                with suppress(OSError):  # the server closed it
                    connection.sendall(piece)
                    self.counts["pieces"] += 1
            time.sleep(0.2)


def head(path: str, length: int | None = None, method: str = "POST") -> bytes:
    """Return a request's header; without `length`, of a chunked body."""
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Connection: close"]
    return "\r\n".join([*lines, size, "", ""]).encode()


def wrapped(before: str, item: str, after: str) -> bytes:
    """Return a body of 8 MB with as many items as fit."""
    count = (BODY_BYTES - len(before) - len(after)) // (len(item) + 1)
    return (before + ",".join([item] * count) + after).encode()


def nothing(attack: Attack) -> None:
    """No attack: the good requests alone, to compare with."""
    time.sleep(max(0.0, attack.end - time.monotonic()))


def slow_readers(attack: Attack) -> None:
    """Streams and answers of megabytes that nobody reads."""
    wanted = {"max_new_tokens": 400, "ignore_eos": True, "n": 8}
    body = {"text": "red", "return_logprob": True, "top_logprobs_num": 20, "sampling_params": wanted}
    with ExitStack() as stack:
        while not attack.is_over:
            for stream in (True, False):
                content = json.dumps(body | {"stream": stream}).encode()
                connection = stack.enter_context(attack.connect(4096))
                connection.sendall(head(GENERATE, len(content)) + content)
            time.sleep(0.5)


def slow_bodies(attack: Attack) -> None:
    """A hundred uploads of 8 MB that never end."""
    with ExitStack() as stack:
        connections = []
        for _ in range(100):
            connection = stack.enter_context(attack.connect())
            connections.append(connection)
            connection.settimeout(5)
            with suppress(OSError):
                connection.sendall(head(COMPLETIONS, BODY_BYTES) + b" " * (BODY_BYTES - 100_000))
        attack.trickle(connections, b" ")


def slow_headers(attack: Attack) -> None:
    """Headers that arrive byte by byte."""
    with ExitStack() as stack:
        connections = [stack.enter_context(attack.connect()) for _ in range(500)]
        for connection in connections:
            connection.sendall(b"POST /generate HTTP/1.1\r\nX: ")
        attack.trickle(connections, b"a")


def trailers(attack: Attack) -> None:
    """Chunk extensions and trailers without an end, also of GET /health."""
    while not attack.is_over:
        for method, path in (("GET", "/health"), ("POST", GENERATE)):
            for begun, piece in ((b"0\r\n", b"x: " + b"a" * 4000 + b"\r\n"), (b"1;", b"e" * 4096)):
                with attack.connect() as connection, suppress(OSError):
                    connection.sendall(head(path, method=method) + begun)
                    for _ in range(2000):
                        connection.sendall(piece)
                attack.counts["requests"] += 1


def wrong_items() -> Bodies:
    """8 MB of wrong items in fields that take lists."""
    message = '{"messages": [{"role": "user", "content": '
    return [
        (CHAT, wrapped(message + "[", "1", "]}]}")),
        (CHAT, wrapped('{"messages": [', "[]", "]}")),
        (CHAT, wrapped('{"messages": [], "stop": [', "1", "]}")),
        (COMPLETIONS, wrapped('{"prompt": "a", "stop_token_ids": [', '"a"', "]}")),
        (COMPLETIONS, wrapped('{"prompt": "a", "logit_bias": {', '"a": "b"', "}}")),
        (COMPLETIONS, wrapped('{"prompt": [', '"\\ud800"', "]}")),
    ]  # fmt: skip


def many_items() -> Bodies:
    """Valid bodies with nearly as many items as allowed, and nested ones."""
    pairs = ",".join(f'"{number}":"x"' for number in range(80_000))
    documents = ",".join(['{"a":"b"}'] * 60_000)
    hello = '{"messages":[{"role":"user","content":"hi"}],"max_tokens":1,'
    return [
        (COMPLETIONS, f'{{"prompt":"a","max_tokens":1,"metadata":{{{pairs}}}}}'.encode()),
        (COMPLETIONS, f'{{"prompt":"a","max_tokens":1,{pairs}}}'.encode()),
        (CHAT, f'{hello}"chat_template_kwargs":{{{pairs}}}}}'.encode()),
        (CHAT, f'{hello}"documents":[{documents}]}}'.encode()),
        (COMPLETIONS, b'{"prompt":"a","x":' + b"[" * 250_000 + b"]" * 250_000 + b"}"),
        (COMPLETIONS, json.dumps({"prompt": [[12345] * 6000] * 80, "max_tokens": 4000}).encode()),
    ]  # fmt: skip


def sampling_bombs() -> Bodies:
    """A million prompts with parameters of their own; thousands of parameters."""
    count = 800_000
    prompts, params = ",".join(['""'] * count), ",".join(["{}"] * count)
    few = json.dumps({"text": ["a"] * 80_000, "sampling_params": [{}] * 80_000}).encode()
    return [
        (GENERATE, f'{{"text":[{prompts}],"sampling_params":[{params}]}}'.encode()),
        (GENERATE, few),
        (GENERATE, wrapped('{"text": "a", "sampling_params": [', "[]", "]}")),
    ]  # fmt: skip


def long_strings() -> Bodies:
    """8 MB in each field that takes a string."""
    text = "abcdefg " * (BODY_BYTES // 8 - 64)
    user = {"role": "user", "content": "hi"}
    tool = {"type": "function", "function": {"name": "f", "description": text}}
    bodies: list[tuple[str, Any]] = [
        (CHAT, {"messages": [user | {"role": text}]}),
        (CHAT, {"messages": [user | {"content": text}]}),
        (CHAT, {"messages": [user | {"name": text}]}),
        (CHAT, {"messages": [user], "tools": [tool]}),
        (CHAT, {"messages": [user], "chat_template": text}),
        (COMPLETIONS, {"prompt": text}),
        (COMPLETIONS, {"prompt": "a", "model": text}),
        (COMPLETIONS, {"prompt": "a", "regex": text}),
        (COMPLETIONS, {"prompt": "a", "cache_salt": text}),
        (GENERATE, {"text": "a", "rid": text}),
        ("/tokenize", {"prompt": text}),
    ]
    return [(path, json.dumps(body).encode()) for path, body in bodies]


def many_prompts() -> Bodies:
    """A thousand long prompts in one request."""
    prompts = [f"{number} {LONG_PROMPT}" for number in range(1000)]
    return [
        (COMPLETIONS, json.dumps({"prompt": prompts, "max_tokens": 1}).encode()),
        (GENERATE, json.dumps({"text": prompts, "sampling_params": {"max_new_tokens": 1}}).encode()),
    ]  # fmt: skip


def large_batch(attack: Attack) -> None:
    """As many long prompts as one request may have."""
    prompts = [f"{number} {LONG_PROMPT}" for number in range(250)]
    attack.repeat([(COMPLETIONS, json.dumps({"prompt": prompts, "max_tokens": 1}).encode())], 1)


def echo_logprobs(attack: Attack) -> None:
    """Twenty prompts with echo and a hundred log-probabilities of each token."""
    prompts = [f"{number} {SENTENCE * 3}" for number in range(20)]
    body = {"prompt": prompts, "max_tokens": 1, "echo": True, "logprobs": 100}
    attack.repeat([(COMPLETIONS, json.dumps(body | {"stream": stream}).encode()) for stream in (False, True)], 1)


def tool_markup(attack: Attack) -> None:
    """Sixteen long outputs at a time of markers of tool calls, most of them without an end, whole and as streams."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool], "n": 8, "max_tokens": 600}
    patterns = (
        "(<tool_call>)+",
        '(<tool_call>\\{"name": )+',
        '<tool_call>\\{"name": "f", "arguments": \\{"a": (\\[|\\{"a":)+',
    )
    bodies = [
        (CHAT, json.dumps(body | {"structured_outputs": {"regex": pattern}, "stream": stream}).encode())
        for pattern in patterns
        for stream in (True, False)
    ]
    attack.repeat(bodies)


def leaving(attack: Attack) -> None:
    """Clients that leave at once, before or within their answer."""
    body = json.dumps({"prompt": "red fox", "max_tokens": 500, "ignore_eos": True, "stream": True}).encode()
    while not attack.is_over:
        with attack.connect() as connection:
            connection.sendall(head(COMPLETIONS, len(body)) + body)
            time.sleep(0.01 * (attack.counts["connections"] % 10))
        attack.counts["requests"] += 1


# Bodies that are sent again and again, by name.
BODIES: dict[str, Callable[[], Bodies]] = {
    bodies.__name__: bodies for bodies in (wrong_items, many_items, sampling_bombs, long_strings, many_prompts)
}
CLIENTS: dict[str, Callable[[Attack], None]] = {
    client.__name__: client
    for client in (
        nothing, slow_readers, slow_bodies, slow_headers, trailers, large_batch, echo_logprobs, tool_markup, leaving,
    )
}  # fmt: skip
ATTACKS = (*CLIENTS, *BODIES)


def summaries() -> Iterator[tuple[str, str]]:
    """Yield the name of each attack and what it does."""
    for name in ATTACKS:
        yield name, ((CLIENTS.get(name) or BODIES[name]).__doc__ or "").strip()


def main() -> int:
    name, url, seconds = sys.argv[1:]
    attack = Attack(url, float(seconds))
    if name in BODIES:
        attack.repeat(BODIES[name]())
    else:
        CLIENTS[name](attack)
    print(json.dumps(attack.counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
