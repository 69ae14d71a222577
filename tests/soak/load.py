"""Load generator: streaming completions over plain sockets, in its own process, so that it is not the bottleneck.

It parses only the HTTP/1.1 that this server sends. See `python -m tests.soak.load --help`; prints one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

USAGE = re.compile(rb'"completion_tokens": ?(\d+)')


@dataclass
class LoadResult:
    """Counts and latencies of one load. Times are in seconds."""

    finished: int = 0
    aborted: int = 0
    refused: dict[str, int] = field(default_factory=dict)  # by status or exception
    tokens: int = 0
    chunks: int = 0
    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    together: int = 0  # maximum number of streams receiving at the same time

    def report(self) -> dict[str, object]:
        """Return the result as a dict, with times as quantiles in milliseconds."""
        return {
            "finished": self.finished, "aborted": self.aborted, "refused": self.refused, "tokens": self.tokens,
            "chunks": self.chunks, "seconds": round(self.seconds, 3), "client_cpu_seconds": round(self.cpu_seconds, 3),
            "streams_together": self.together, "tokens_per_second": round(self.tokens / max(self.seconds, 1e-9), 1),
            "first_token_ms": quantiles(self.first), "request_ms": quantiles(self.whole),
        }  # fmt: skip


def quantiles(times: list[float]) -> dict[str, float]:
    """Return p50, p95 and p99 in milliseconds."""
    if not times:
        return {}
    ordered = sorted(times)
    return {f"p{p}": round(1000 * ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 2) for p in (50, 95, 99)}


@dataclass
class Load:
    """Send `requests` streams, at most `streams` at a time, and abort `aborts` of them at a random moment.

    Each requests `tokens` tokens for a prompt of `prompt_tokens` random ids below `vocab`. One to be aborted requests
    twice as many and is aborted up to `abort_seconds` after it was sent, possibly before its response starts.
    """

    url: str
    requests: int
    streams: int
    tokens: int
    prompt_tokens: int = 16
    vocab: int = 300
    aborts: int = 0
    abort_seconds: float = 1.0
    seed: int = 0

    async def run(self) -> LoadResult:
        """Send all requests and wait until they have ended."""
        rng = random.Random(self.seed)
        leave = [True] * self.aborts + [False] * (self.requests - self.aborts)
        rng.shuffle(leave)
        plans = [
            (self._body(rng, 1 + leaves), rng.uniform(0, self.abort_seconds) if leaves else None) for leaves in leave
        ]
        result, rest, self._open = LoadResult(), iter(plans), 0
        began, cpu = time.perf_counter(), time.process_time()

        async def worker() -> None:
            for body, after in rest:
                await self._request(body, after, result)

        await asyncio.gather(*(worker() for _ in range(self.streams)))
        result.seconds, result.cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
        return result

    def _body(self, rng: random.Random, times: int) -> bytes:
        ids = [rng.randrange(3, self.vocab) for _ in range(self.prompt_tokens)]
        return json.dumps({
            "prompt": ids, "max_tokens": times * self.tokens, "ignore_eos": True, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True},
        }).encode()  # fmt: skip

    async def _request(self, body: bytes, leave_after: float | None, result: LoadResult) -> None:
        began = time.perf_counter()
        try:
            if leave_after is None:
                await self._stream(body, result, began)
            else:
                await asyncio.wait_for(self._stream(body, result, began), leave_after)
        except TimeoutError:
            result.aborted += 1
        except (OSError, EOFError) as broken:
            result.refused[type(broken).__name__] = result.refused.get(type(broken).__name__, 0) + 1

    async def _stream(self, body: bytes, result: LoadResult, began: float) -> None:
        where = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=1 << 20)
        counted = False
        try:
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode() + body)
            status = (await reader.readline()).split()
            if len(status) < 2:
                raise EOFError("no answer")
            if status[1] != b"200":
                name = status[1].decode()
                result.refused[name] = result.refused.get(name, 0) + 1
                return
            tail, chunks = b"", 0
            while piece := await reader.read(1 << 16):
                arrived = piece.count(b"data: ")
                if arrived and not counted:
                    counted = True
                    result.first.append(time.perf_counter() - began)
                    self._open += 1
                    result.together = max(result.together, self._open)
                chunks += arrived
                tail = (tail + piece)[-2000:]
            if b"data: [DONE]" not in tail or not (usage := USAGE.findall(tail)):
                raise EOFError("the stream broke off")
            result.tokens += int(usage[-1])
            result.chunks += chunks
            result.finished += 1
            result.whole.append(time.perf_counter() - began)
        finally:
            self._open -= counted
            writer.transport.abort()  # an aborting client resets its connection


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="of the server, such as http://127.0.0.1:8000")
    for name, value in (("requests", 64), ("streams", 64), ("tokens", 64), ("prompt-tokens", 16), ("vocab", 300),
                        ("aborts", 0), ("seed", 0)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--abort-seconds", type=float, default=1.0)
    found = parser.parse_args(arguments)
    result = asyncio.run(Load(**vars(found)).run())
    print(json.dumps(result.report()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
