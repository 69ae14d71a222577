"""Decodes of requests that share a prefix: one system prompt for all, or several samples of each prompt.

    python -m benchmarks serving.shared_prefix --shape llama-3.1-8b --engines encore,single_rows,sglang --json FILE

Random weights, greedy, prompts as token ids, with prefix caching; the prefixes are in the cache before. `single_rows`
is Encore with attention that reads the keys of each row for that row alone. Each run is a separate process, and the
engines take turns.

common_ms: decode step of --rows requests that share --prefix tokens, as decode_ms of serving.offline
common_seconds: those requests with 64 output tokens each, from the first prompt to the last token
samples_ms: decode step of --rows requests that are --samples samples of each prompt of --prefix tokens
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from benchmarks import harness
from benchmarks.serving.offline import Run, add_engine_arguments, encore, run_in_turns, sglang
from benchmarks.shapes import shape_config, write_shape

NEEDS = "CPU or 1 GPU"


def single_rows(folder: str, args: argparse.Namespace, found: dict[str, Any]) -> Run:
    """Start Encore without the graphs of shared prefixes' attention in use."""
    from engine.worker import model_runner

    model_runner.MIN_SHARED_BYTES = 1 << 60
    return encore(folder, args, found)


ENGINES = {"encore": encore, "single_rows": single_rows, "sglang": sglang}
CACHED = {"encore": {"enable_prefix_caching": True}, "sglang": {"disable_radix_cache": False}}


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """All figures of one engine, in this process."""
    vocab, rng = shape_config(args.shape)["vocab_size"], random.Random(0)
    args.settings = CACHED.get(name, CACHED["encore"]) | args.settings
    found: dict[str, Any] = {"engine": name, "shape": args.shape}
    run = ENGINES[name](write_shape(args.shape, tempfile.mkdtemp()), args, found)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(100, vocab - 100) for _ in range(count)]

    def timed(prefixes: list[list[int]], length: int) -> float:
        prompts = [prefixes[row % len(prefixes)] + tokens(32) for row in range(args.rows)]
        return run(prompts, [length] * args.rows)[0]

    def decode_ms(prefixes: list[list[int]]) -> float:
        run(prefixes, [1] * len(prefixes))
        timed(prefixes, 4)
        steps = [(timed(prefixes, 160) - timed(prefixes, 32)) / 128 * 1e3 for _ in range(args.repeats)]
        return round(statistics.median(steps), 4)

    common = [tokens(args.prefix)]
    found["common_ms"] = decode_ms(common)
    found["common_seconds"] = round(statistics.median(timed(common, 64) for _ in range(args.repeats)), 4)
    found["samples_ms"] = decode_ms([tokens(args.prefix) for _ in range(-(-args.rows // args.samples))])
    getattr(run, "report", lambda: None)()
    return found


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    add_engine_arguments(parser, ENGINES, context=4096)
    parser.add_argument("--rows", type=harness.count, default=128, help="requests that decode together")
    parser.add_argument("--prefix", type=harness.count, default=2048, help="tokens of a shared prefix")
    parser.add_argument("--samples", type=harness.count, default=16, help="samples of each prompt")
    parser.add_argument("--repeats", type=harness.count, default=3)
    args = parser.parse_args(argv)
    if args.one:
        args.json.write_text(json.dumps(measure(args.one, args)))
        os._exit(0)  # a peer's worker processes may outlive its engine otherwise
    report = harness.Report(__spec__.name, args, argv)
    options = {name: getattr(args, name) for name in ("shape", "rows", "prefix", "samples", "repeats", "context")}
    return run_in_turns(__spec__.name, report, options, args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
