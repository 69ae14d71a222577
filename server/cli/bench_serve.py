"""The command `bench serve`: load on a running server, of Encore or any other that speaks OpenAI's API."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import math
import os
import random
import shlex
import sys
import time
from collections.abc import Callable
from typing import Any

from engine.errors import ConfigError
from server.cli.bench import require_writable
from server.cli.parser import Parser, whole_number

DATASETS = ("random", "sharegpt", "shared-prefix")
INPUT_TOKENS, OUTPUT_TOKENS = 1024, 128
BUSY = 0.8  # share of its time above which the client may be what limits the figures
LATE_SECONDS = 0.1
COUNT, COUNT_OR_ZERO = whole_number(1, 10_000_000), whole_number(0, 10_000_000)


def add_arguments(parser: Parser) -> None:
    """Add the arguments."""
    parser.add_argument("url", metavar="URL", help="the server, such as http://127.0.0.1:8000; its key: OPENAI_API_KEY")
    parser.add_argument("--model", metavar="TEXT", help="model name (default: the first one that the server lists)")
    parser.add_argument("--chat", action="store_true", help="send chats to /v1/chat/completions, not /v1/completions")
    load = parser.add_argument_group("load")
    load.add_argument("--num-prompts", type=COUNT, default=100, metavar="N", help="number of requests (default: 100)")
    load.add_argument(
        "--request-rate", type=_rate, default=math.inf, metavar="X",
        help="requests per second; inf: all at once (default: inf)",
    )  # fmt: skip
    load.add_argument(
        "--burstiness", type=_positive, default=1.0, metavar="X",
        help="1: Poisson arrivals; less: burstier; more: more even (default: 1)",
    )  # fmt: skip
    load.add_argument("--max-concurrency", type=COUNT, metavar="N", help="maximum number of requests at a time")
    load.add_argument("--warm-up", type=COUNT_OR_ZERO, default=1, metavar="N", help="requests before (default: 1)")
    load.add_argument("--ignore-eos", action="store_true", help="generate all output tokens; not every server can")
    load.add_argument("--temperature", type=float, default=0.0, metavar="X", help="sampling temperature (default: 0)")
    load.add_argument("--seed", type=int, default=0, metavar="N", help="seed of prompts and arrivals (default: 0)")
    data = parser.add_argument_group("dataset")
    data.add_argument("--dataset", choices=DATASETS, default="random", help="prompts (default: random)")
    data.add_argument("--dataset-path", metavar="FILE", help="a ShareGPT file, for sharegpt")
    data.add_argument(
        "--input-tokens", type=COUNT, metavar="N",
        help=f"tokens of a prompt; for shared-prefix, after the prefix (default: {INPUT_TOKENS})",
    )  # fmt: skip
    data.add_argument(
        "--output-tokens", type=COUNT, metavar="N",
        help=f"maximum tokens of an output (default: {OUTPUT_TOKENS}; for sharegpt, as the conversation)",
    )  # fmt: skip
    data.add_argument(
        "--range-ratio", type=_share, metavar="X", help="random lengths: up to this share more or less (default: 0)"
    )
    data.add_argument("--prefix-tokens", type=COUNT, metavar="N", help="tokens of a shared prefix (default: 256)")
    data.add_argument("--num-prefixes", type=COUNT, metavar="N", help="number of shared prefixes (default: 10)")
    out = parser.add_argument_group("output")
    out.add_argument("--json", metavar="FILE", help="also write the report to FILE")
    out.add_argument("--plot", metavar="FILE", help="also draw a plot: .svg, .png or .pdf; needs matplotlib")


def run(args: argparse.Namespace) -> int:
    """Load the server and print the report. Return 1 if a request failed."""
    import uvloop

    from server.cli.load.datasets import read_sharegpt
    from server.cli.load.plot import draw, require_plot
    from server.cli.load.report import table

    _require_dataset(args)
    if args.plot is not None:
        require_plot(args.plot)
    for flag, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None:
            require_writable(flag, path)
    turns = read_sharegpt(args.dataset_path) if args.dataset == "sharegpt" else []
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report, results = runner.run(_measure(args, turns))
    print(table(report))
    for note in _notes(report):
        print(f"note: {note}", file=sys.stderr)
    if args.json is not None:
        with open(args.json, "w", encoding="utf-8") as file:
            file.write(json.dumps(report, indent=1) + "\n")
        print(f"written to {args.json}")
    if args.plot is not None:
        draw(report, results, args.plot)
        print(f"drawn to {args.plot}")
    return 1 if report["failed"] else 0


async def _measure(args: argparse.Namespace, turns: list[tuple[str, str]]) -> tuple[dict[str, Any], Any]:
    from server.cli.load.client import Client, Target
    from server.cli.load.datasets import arrival_times
    from server.cli.load.report import summary

    path = "/v1/chat/completions" if args.chat else "/v1/completions"
    client = Client(Target(args.url, os.environ.get("OPENAI_API_KEY", ""), path))
    try:
        model = args.model or await _first_model(client)
        rng = random.Random(args.seed)
        prompts = _prompts(args, turns, rng, await _scale(client, args, model))
        delays = arrival_times(rng, args.num_prompts, args.request_rate, args.burstiness)
        bodies = [_body(args, model, one.text, one.output_tokens) for one in prompts]
        if args.warm_up:
            warm = [_body(args, model, prompts[0].text[::-1], prompts[0].output_tokens)] * args.warm_up
            first, *_ = await client.run(warm, [0.0] * args.warm_up, args.max_concurrency)
            if first.error:
                raise ConfigError(f"{args.url}: POST {path}: {' '.join(first.error.split())}")
        cpu = time.process_time()
        results = await client.run(bodies, delays, args.max_concurrency)
        figures = summary(results, [one.tokens for one in prompts], time.process_time() - cpu)
    finally:
        await client.close()
    late = max((one.sent - delay for one, delay in zip(results, delays, strict=True)), default=0.0)
    report = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["encore", *args.words]),
        "backend": "openai-chat" if args.chat else "openai",
        "model_id": model,
        "dataset": args.dataset,
        "num_prompts": args.num_prompts,
        "request_rate": "inf" if math.isinf(args.request_rate) else args.request_rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "latest_start_ms": round(1e3 * late, 3),
    }
    return report | figures, results


async def _first_model(client: Any) -> str:
    listed = await client.json("GET", "/v1/models")
    try:
        return str(listed["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise ConfigError(f"{client.target.url} lists no model: give --model") from None


async def _scale(client: Any, args: argparse.Namespace, model: str) -> Any:
    """Ask the server how many tokens two texts have."""
    from server.cli.load.datasets import Scale, random_text

    counts = []
    for words in (4, 36):
        text = random_text(random.Random(2), words)
        body = _body(args, model, text, 1) | {"stream": False}
        body.pop("stream_options")
        answer = await client.json("POST", client.target.path, body)
        usage = answer.get("usage") if isinstance(answer, dict) else None
        if not isinstance(usage, dict) or not isinstance(usage.get("prompt_tokens"), int):
            raise ConfigError(f"{args.url}: POST {client.target.path}: the response has no usage.prompt_tokens")
        counts.append((words, usage["prompt_tokens"]))
    return Scale.fit(*counts)


def _prompts(args: argparse.Namespace, turns: list[tuple[str, str]], rng: random.Random, scale: Any) -> Any:
    from server.cli.load import datasets

    if args.dataset == "sharegpt":
        return datasets.sharegpt_prompts(rng, scale, args.num_prompts, turns, args.output_tokens)
    inputs, outputs = args.input_tokens or INPUT_TOKENS, args.output_tokens or OUTPUT_TOKENS
    if args.dataset == "random":
        return datasets.random_prompts(rng, scale, args.num_prompts, inputs, outputs, args.range_ratio or 0.0)
    return datasets.shared_prefix_prompts(
        rng, scale, args.num_prompts, args.num_prefixes or 10, args.prefix_tokens or 256, inputs, outputs
    )


def _body(args: argparse.Namespace, model: str, text: str, max_tokens: int) -> dict[str, Any]:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if args.chat else {"prompt": text}
    options = {"ignore_eos": True} if args.ignore_eos else {}
    return {
        "model": model, **prompt, "max_tokens": max_tokens, "temperature": args.temperature, "stream": True,
        "stream_options": {"include_usage": True}, **options,
    }  # fmt: skip


def _require_dataset(args: argparse.Namespace) -> None:
    """Raise ConfigError for a flag that the dataset does not have, which would be ignored."""
    own = {
        "dataset_path": ("sharegpt",), "input_tokens": ("random", "shared-prefix"), "range_ratio": ("random",),
        "prefix_tokens": ("shared-prefix",), "num_prefixes": ("shared-prefix",),
    }  # fmt: skip
    for name, datasets in own.items():
        if getattr(args, name) is not None and args.dataset not in datasets:
            raise ConfigError(
                f"--{name.replace('_', '-')} applies to --dataset {' or '.join(datasets)} only: leave it out"
            )
    if args.dataset == "sharegpt" and args.dataset_path is None:
        raise ConfigError("--dataset sharegpt needs --dataset-path, a ShareGPT file")


def _notes(report: dict[str, Any]) -> list[str]:
    """Return warnings about what makes the figures doubtful."""
    found = []
    for error, count in list(report["errors"].items())[:3]:
        found.append(f"{count} requests failed: {' '.join(error.split())[:300]}")
    if report["client_utilization"] > BUSY:
        found.append(
            f"the client itself was busy for {100 * report['client_utilization']:.0f}% of the time: it may limit the "
            "figures; use a machine with faster cores, or several clients"
        )
    if report["latest_start_ms"] > 1e3 * LATE_SECONDS and not report["max_concurrency"]:
        found.append(
            f"requests began up to {report['latest_start_ms']:.0f} ms late: the client can't keep this rate up"
        )
    if 0 < report["completed"] < 30:
        found.append(f"percentiles of {report['completed']} requests say little: raise --num-prompts")
    return found


def _number(is_valid: Callable[[float], bool], wanted: str) -> Callable[[str], float]:
    """Return the `type` of an argument that is a valid number."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if is_valid(float(text)):
                return float(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")

    return parse


_rate = _number(lambda one: one > 0, "a number above 0, or inf")
_positive = _number(lambda one: 0 < one < math.inf, "a number above 0")
_share = _number(lambda one: 0 <= one < 1, "a number from 0 to below 1")
