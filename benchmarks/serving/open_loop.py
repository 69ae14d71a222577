"""Latency under open-loop load: requests arrive at random times, whether or not earlier ones have ended.

    python -m benchmarks serving.open_loop --shape llama-3.1-8b --engines encore,sglang --rate 11 --json FILE

Arrivals are a Poisson process of --rate requests per second, the same for all engines (seed 7). Inputs are uniform in
64..4,096 tokens, outputs in 16..512, greedy, random weights. With --long-every S, a prompt of --long-prompt tokens with
16 output tokens arrives every S seconds besides; its first token is reported apart. Each engine runs in a separate
process and streams within it, without HTTP.

first_token_ms: from the arrival of a request to its first token
inter_token_ms: between two events of a stream that bring tokens, except in streams of long prompts
output_tokens_per_s: from the first arrival to the last token
late_ms: how late requests were submitted at most, a limit of what this client can drive
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

from benchmarks import harness
from benchmarks.serving.offline import add_engine_arguments, child, encore_config, sglang_engine
from benchmarks.shapes import shape_config, write_shape

NEEDS = "CPU or 1 GPU"
LONG_OUTPUT = 16
COLUMNS = ("engine", "long_every_s", "first_token_ms.p50", "first_token_ms.p99", "inter_token_ms.p50",
           "inter_token_ms.p99", "long_first_token_ms.p50", "output_tokens_per_s", "late_ms")  # fmt: skip
Stream = Callable[[list[int], int], AsyncIterator[int]]
"""(prompt, output tokens) -> the number of tokens so far, at each event of the stream."""


class Arrival(NamedTuple):
    """One request of the load: seconds after the start, and lengths in tokens."""

    at: float
    prompt_tokens: int
    output_tokens: int
    is_long: bool = False


def arrivals(args: argparse.Namespace, long_every: float) -> list[Arrival]:
    """Return the load's requests in order of time; `long_every`: seconds between long prompts, 0 for none."""
    rng = random.Random(7)
    times = itertools.accumulate(rng.expovariate(args.rate) for _ in range(args.requests))
    load = [Arrival(at, rng.randint(*args.prompts), rng.randint(*args.outputs)) for at in times]
    if long_every:
        load += [
            Arrival(number * long_every, args.long_prompt, LONG_OUTPUT, True)
            for number in range(1, int(load[-1].at / long_every) + 1)
        ]
    return sorted(load)


async def run_load(stream: Stream, load: list[Arrival], vocab: int) -> dict[str, Any]:
    """Drive one load and return its figures."""
    rng = random.Random(0)
    prompts = [[rng.randrange(100, vocab - 100) for _ in range(arrival.prompt_tokens)] for arrival in load]
    first: list[float] = []
    long_first: list[float] = []
    gaps: list[float] = []
    late: list[float] = []
    started = time.perf_counter()

    async def request(arrival: Arrival, prompt: list[int]) -> int:
        due = started + arrival.at
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        late.append(time.perf_counter() - due)
        tokens, last = 0, due
        async for total in stream(prompt, arrival.output_tokens):
            now = time.perf_counter()
            if not tokens:
                (long_first if arrival.is_long else first).append(now - due)
            elif total > tokens and not arrival.is_long:
                gaps.append(now - last)
            tokens, last = total, now
        if tokens != arrival.output_tokens:
            raise SystemExit(f"{arrival.output_tokens} tokens were asked for, {tokens} came")
        return tokens

    counts = await asyncio.gather(*(request(*pair) for pair in zip(load, prompts, strict=True)))
    return {
        "first_token_ms": quantiles(first),
        "inter_token_ms": quantiles(gaps),
        "long_first_token_ms": quantiles(long_first),
        "output_tokens_per_s": round(sum(counts) / (time.perf_counter() - started)),
        "late_ms": round(max(late) * 1e3, 1),
    }


def quantiles(seconds: list[float]) -> dict[str, float | None]:
    """Return median, 99th percentile and maximum in ms, None without values."""
    values = sorted(seconds)
    return {name: harness.quantile_ms(values, share) for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}


async def encore_loads(folder: str, args: argparse.Namespace, run: Callable[[Stream], Any]) -> None:
    from engine import SamplingParams
    from engine.client.async_client import make_client

    client = make_client(encore_config(folder, args))
    await client.start()
    numbers = itertools.count()

    async def stream(prompt: list[int], length: int) -> AsyncIterator[int]:
        params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
        total = 0
        async for deltas in client.stream(str(next(numbers)), prompt_token_ids=prompt, params=params):
            total += sum(len(delta.token_ids) for delta in deltas)
            yield total

    await run(stream)
    await client.close()


async def sglang_loads(engine: Any, run: Callable[[Stream], Any]) -> None:
    async def stream(prompt: list[int], length: int) -> AsyncIterator[int]:
        params = {"max_new_tokens": length, "temperature": 0.0, "ignore_eos": True}
        async for output in await engine.async_generate(input_ids=prompt, sampling_params=params, stream=True):
            yield output["meta_info"]["completion_tokens"]

    await run(stream)


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """All loads of one engine, in this process."""
    folder, vocab = write_shape(args.shape, tempfile.mkdtemp()), shape_config(args.shape)["vocab_size"]
    found: dict[str, Any] = {"engine": name, "shape": args.shape, "rate": args.rate, "loads": []}

    async def run(stream: Stream) -> None:
        await run_load(stream, arrivals(args, 0)[: args.warm_up], vocab)
        for long_every in [0.0] + ([args.long_every] if args.long_every else []):
            load = await run_load(stream, arrivals(args, long_every), vocab)
            found["loads"].append({"long_every_s": long_every} | load)

    if name == "encore":
        asyncio.run(encore_loads(folder, args, run))
    else:
        engine = sglang_engine(folder, args, found)
        engine.loop.run_until_complete(sglang_loads(engine, run))
    return found


def length_range(text: str) -> tuple[int, int]:
    """Convert LOW,HIGH to both lengths, inclusive."""
    found = harness.counts(text)
    if len(found) != 2 or found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not LOW,HIGH with LOW at most HIGH")
    return found[0], found[1]


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    add_engine_arguments(parser, ("encore", "sglang"), context=17000)
    parser.add_argument("--rate", type=harness.positive, default=10.0, help="requests per second")
    parser.add_argument("--requests", type=harness.count, default=384)
    parser.add_argument("--prompts", type=length_range, default=(64, 4096), metavar="LOW,HIGH", help="input tokens")
    parser.add_argument("--outputs", type=length_range, default=(16, 512), metavar="LOW,HIGH", help="output tokens")
    parser.add_argument("--long-every", type=harness.positive, help="seconds between long prompts, in a second load")
    parser.add_argument("--warm-up", type=harness.count, default=32, help="requests before the loads, not counted")
    args = parser.parse_args(argv)
    if args.one:
        args.json.write_text(json.dumps(measure(args.one, args)))
        os._exit(0)  # a peer's worker processes may outlive its engine otherwise
    report = harness.Report(__spec__.name, args, argv)
    options = {
        "shape": args.shape, "rate": args.rate, "requests": args.requests, "warm-up": args.warm_up,
        "prompts": ",".join(map(str, args.prompts)), "outputs": ",".join(map(str, args.outputs)),
        "long-prompt": args.long_prompt, "context": args.context,
    } | ({"long-every": args.long_every} if args.long_every else {})  # fmt: skip

    def run(name: str) -> None:
        found = child(__spec__.name, name, options, args.settings, dict(args.path))
        for load in found.pop("loads", [{}]):
            report.add(found | load)

    harness.alternate({name: lambda name=name: run(name) for name in args.engines}, args.rounds)
    report.finish(COLUMNS)
    return 1 if any("error" in row for row in report.rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
