"""The command `bench`: offline latency and throughput of one engine as a table, and as JSON with `--json FILE`.

bench_serve.py measures a running server.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError
from server.cli.flags import add_flags, given
from server.cli.parser import Parser, whole_number

COUNT, COUNT_OR_ZERO = whole_number(1, 1_000_000), whole_number(0, 1_000_000)
# The command captures every graph itself, prompts are random, and benchmark traffic must not change the manifest.
DEFAULTS: Mapping[str, Any] = {"warmup": "lazy", "graph_manifest": "none", "enable_prefix_caching": False}


def add_arguments(parser: Parser) -> None:
    """Add the flags of the measurement and of the engine."""
    parser.add_argument("--batch-sizes", type=_counts, metavar="N,N", help="default: 1, 2, 4, … up to max-num-seqs")
    for flag, default, text in (
        ("--prompt-tokens", 128, "tokens per prompt (random ids)"),
        ("--output-tokens", 64, "tokens to generate per sequence"),
        ("--repeats", 3, "timed runs; medians are reported"),
    ):
        parser.add_argument(flag, type=COUNT, default=default, metavar="N", help=f"{text} (default: {default})")
    parser.add_argument(
        "--requests",
        type=COUNT_OR_ZERO,
        default=32,
        metavar="N",
        help="requests of the mixed-length run; 0 skips it (default: 32)",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the report to FILE")
    add_flags(parser, EngineConfig, defaults=DEFAULTS)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and write the JSON. Raises EngineError for errors that a user can fix."""
    from engine.bench import report

    plan, config = _plan(args)
    if args.json is not None:
        require_writable("--json", args.json)
    found = report.run(config, command=["encore", *args.words], **plan)
    if args.json is not None:
        with open(args.json, "w", encoding="utf-8") as file:
            file.write(json.dumps(found, indent=1) + "\n")
        print(f"written to {args.json}")
    return 0


def _plan(args: argparse.Namespace) -> tuple[dict[str, Any], EngineConfig]:
    """Return the arguments of `report.run` and an engine config that fits them.

    Raises ConfigError for contradictions.
    """
    engine = given(args, EngineConfig)
    if engine.get("cuda_graph_impl", "local") != "local":
        engine.setdefault("inference_cuda_graph_scope", None)  # the default scope is valid for "local" only
    if args.output_tokens < 2:
        raise ConfigError("--output-tokens 1: the step time is the difference of two runs, so give at least 2")
    length = args.prompt_tokens + args.output_tokens
    if engine.setdefault("max_model_len", length) < length:
        raise ConfigError(
            f"--prompt-tokens {args.prompt_tokens} and --output-tokens {args.output_tokens} exceed "
            f"--max-model-len {engine['max_model_len']}: lower them or raise it"
        )
    if args.batch_sizes:
        largest = max(args.batch_sizes)
        if engine.setdefault("max_num_seqs", largest) < largest:
            raise ConfigError(
                f"--batch-sizes: {largest} exceeds --max-num-seqs {engine['max_num_seqs']}, so that batch "
                "would never run in one step: lower it or raise --max-num-seqs"
            )
    wanted = ("batch_sizes", "prompt_tokens", "output_tokens", "repeats", "requests")
    return {name: getattr(args, name) for name in wanted}, EngineConfig.from_dict({**DEFAULTS, **engine})


def require_writable(flag: str, path: str) -> None:
    """Raise ConfigError if the file can't be written, before the measurement rather than after it."""
    target = path if os.path.exists(path) else os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.access(target, os.W_OK):
        raise ConfigError(f"{flag} {path}: can't write this file; name a file in an existing, writable folder")


def _counts(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(COUNT(part.strip()) for part in text.split(",")))
