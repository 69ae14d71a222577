"""`encore bench`: offline latency and throughput of one engine as a table, and as JSON with `--json FILE`.

Defines the flags, the table and the report; measure.py defines the measurements.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from engine import config as settings
from engine.config import EngineConfig
from engine.errors import ConfigError

PROG = "encore bench"
MAX_COUNT = 1_000_000
# The command captures every graph itself, prompts are random, and benchmark traffic must not change the manifest.
DEFAULTS: Mapping[str, Any] = {"warmup": "lazy", "graph_manifest": "none", "enable_prefix_caching": False}
CHOICES = {
    "dtype": settings.DTYPES,
    "load_format": settings.LOAD_FORMATS,
    "cpu_weight_format": settings.CPU_WEIGHT_FORMATS,
    "warmup": settings.WARMUPS,
    "logprobs_mode": settings.LOGPROBS_MODES,
}
COLUMNS = (
    # heading, path of the value in a row, decimals
    ("batch", ("batch",), 0),
    ("first token ms", ("first_token_ms",), 1),
    ("prefill tok/s", ("prefill_tokens_per_second",), 0),
    ("decode ms/step", ("decode_ms_per_step",), 3),
    ("decode tok/s", ("decode_tokens_per_second",), 1),
    ("overall tok/s", ("tokens_per_second",), 1),
    ("bucket", ("replay_against_eager", "bucket"), 0),
    ("replay ms", ("replay_against_eager", "replay_ms"), 3),
    ("eager ms", ("replay_against_eager", "eager_ms"), 3),
    ("speed-up", ("replay_against_eager", "speedup"), 2),
)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str]) -> int:
    """Run the command with the arguments `argv` and return 0. Raises EngineError for errors that a user can fix."""
    args = _parser().parse_args(list(argv))
    plan, config = _plan(args)
    if args.json is not None:
        _require_writable(args.json)
    report = run(config, command=["encore", "bench", *argv], **plan)
    if args.json is not None:
        with open(args.json, "w", encoding="utf-8") as file:
            file.write(json.dumps(report, indent=1) + "\n")
        print(f"written to {args.json}")
    return 0


def run(
    config: EngineConfig,
    *,
    batch_sizes: Sequence[int] | None = None,
    prompt_tokens: int = 128,
    output_tokens: int = 64,
    repeats: int = 3,
    requests: int = 32,
    command: Sequence[str] = (),
    show: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Load the model, capture its graphs, measure, and return the report.

    `show` is called with the heading, then with table and summary. `batch_sizes=None` means 1, 2, 4, … up to the
    engine's max_num_seqs. `requests=0` skips the mixed run.
    """
    from engine.bench import measure
    from engine.engine import Engine

    started = time.perf_counter()
    with Engine(config) as engine:
        load_seconds = time.perf_counter() - started
        report = measure.circumstances(list(command)) | {
            "model": dataclasses.asdict(engine.info),
            "load_seconds": round(load_seconds, 3),
        }
        show(_heading(report))
        engine.warm()
        report["warm_seconds"] = round(time.perf_counter() - started - load_seconds, 3)
        sizes = list(batch_sizes or doubling(engine.info.max_num_seqs))
        rng = random.Random(config.seed)
        report["batches"] = [
            measure.measure_batch(engine, size, prompt_tokens, output_tokens, repeats, rng) for size in sizes
        ]
        if requests:
            report["mixed"] = measure.measure_mixed(engine, requests, prompt_tokens, output_tokens, config.seed)
        report["decode"] = measure.decode_shares(engine.stats().graphs, _zero_counters())
        engine.idle_check()
        for row in report["batches"]:  # last, because it overwrites KV pages
            row["replay_against_eager"] = measure.replay_against_eager(
                engine, row["batch"], prompt_tokens + output_tokens // 2
            )
        report["graphs"] = measure.graph_summary(engine)
    show(table(report["batches"]))
    show(_summary(report))
    return report


def doubling(limit: int) -> list[int]:
    """Return the powers of 2 below `limit`, and `limit` itself."""
    return [*(1 << power for power in range(limit.bit_length()) if 1 << power < limit), limit]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows of measure_batch, each with its `replay_against_eager`, as aligned text."""

    def cell(row: Mapping[str, Any], path: tuple[str, ...], decimals: int) -> str:
        value: Any = row
        for key in path:
            value = value.get(key) if value is not None else None
        return "-" if value is None else f"{value:,.{decimals}f}"

    lines = [[heading for heading, _, _ in COLUMNS]]
    lines += [[cell(row, path, decimals) for _, path, decimals in COLUMNS] for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines)


def _heading(report: Mapping[str, Any]) -> str:
    model = report["model"]
    hardware = report["gpu"] if model["device"].startswith("cuda") else f"{report['cpu']}, {report['threads']} threads"
    return (
        f"{model['name']} ({model['architecture']}, {model['weight_format']}) on {hardware}; torch {report['torch']}; "
        f"loaded in {report['load_seconds']:.1f} s"
    )


def _summary(report: Mapping[str, Any]) -> str:
    graphs, decode, lines = report["graphs"], report["decode"], []
    lines.append(
        f"graphs      {graphs['captured']} captured in {graphs['capture_seconds']:.2f} s, pool "
        f"{graphs['pool_bytes'] / 1e6:.1f} MB" + (f", {graphs['failed']} FAILED" if graphs["failed"] else "")
    )
    lines.append(
        f"decode      {decode['decode_steps']} steps, {_percent(decode['hit_rate'])} replayed, "
        f"{_percent(decode['padding'])} of their rows padding"
    )
    mixed = report.get("mixed")
    if mixed:
        lines.append(
            f"mixed       {mixed['requests']} requests ({mixed['prompt_tokens']} tokens in, "
            f"{mixed['output_tokens']} out) in {mixed['seconds']:.2f} s: "
            f"{mixed['output_tokens_per_second']:,.1f} tok/s out, {mixed['total_tokens_per_second']:,.1f} "
            f"in and out; {_percent(mixed['hit_rate'])} replayed, {_percent(mixed['padding'])} padding"
        )
    preempted = sum(row["preemptions"] for row in report["batches"])
    if preempted:
        lines.append(
            f"note        {preempted} preemptions: the KV cache is too small for the largest batches; raise --num-pages"
        )
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def _zero_counters() -> dict[str, Any]:
    return {"batch_rows": [], "fallbacks": [], "real_tokens": [], "padded_tokens": []}


# ---- command line --------------------------------------------------------------------------------------------------


def _parser() -> Parser:
    parser = Parser(prog=PROG, description="Measure latency and throughput without a server.", allow_abbrev=False)
    parser.add_argument("--batch-sizes", type=_counts, metavar="N,N", help="default: 1, 2, 4, … up to max-num-seqs")
    for flag, default, text in (
        ("--prompt-tokens", 128, "tokens per prompt (random ids)"),
        ("--output-tokens", 64, "tokens to generate per sequence"),
        ("--repeats", 3, "timed runs; medians are reported"),
    ):
        parser.add_argument(flag, type=_count, default=default, metavar="N", help=f"{text} (default: {default})")
    parser.add_argument(
        "--requests",
        type=_count_or_none,
        default=32,
        metavar="N",
        help="requests of the mixed-length run; 0 skips it (default: 32)",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the report to FILE")
    group = parser.add_argument_group("engine", "engine settings, as for `encore serve`")
    for field in dataclasses.fields(EngineConfig):
        if field.name == "mode":
            continue  # only inference is measured
        flag = "--" + field.name.replace("_", "-")
        if field.type.startswith("bool"):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS)
        else:
            group.add_argument(
                flag,
                type=_TYPES[field.type],
                choices=CHOICES.get(field.name),
                metavar=None if field.name in CHOICES else "X",
                default=argparse.SUPPRESS,
            )
    return parser


def _plan(args: argparse.Namespace) -> tuple[dict[str, Any], EngineConfig]:
    """Return the arguments of `run` and an engine config that fits them. Raises ConfigError for contradictions."""
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    given = {name: value for name, value in vars(args).items() if name in names}
    if given.get("cuda_graph_impl", "local") != "local":
        given.setdefault("inference_cuda_graph_scope", None)  # the default scope is valid for "local" only
    if args.output_tokens < 2:
        raise ConfigError("--output-tokens 1: the step time is the difference of two runs, so give at least 2")
    length = args.prompt_tokens + args.output_tokens
    if given.setdefault("max_model_len", length) < length:
        raise ConfigError(
            f"--prompt-tokens {args.prompt_tokens} and --output-tokens {args.output_tokens} exceed "
            f"--max-model-len {given['max_model_len']}: lower them or raise it"
        )
    if args.batch_sizes:
        largest = max(args.batch_sizes)
        if given.setdefault("max_num_seqs", largest) < largest:
            raise ConfigError(
                f"--batch-sizes: {largest} exceeds --max-num-seqs {given['max_num_seqs']}, so that batch "
                "would never run in one step: lower it or raise --max-num-seqs"
            )
    wanted = ("batch_sizes", "prompt_tokens", "output_tokens", "repeats", "requests")
    return {name: getattr(args, name) for name in wanted}, EngineConfig.from_dict({**DEFAULTS, **given})


def _require_writable(path: str) -> None:
    """Raise ConfigError if the file can't be written, before the measurement rather than after it."""
    target = path if os.path.exists(path) else os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.access(target, os.W_OK):
        raise ConfigError(f"--json {path}: can't write this file; name a file in an existing, writable folder")


def _whole(text: str, low: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not low <= value <= MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {MAX_COUNT}")
    return value


def _count(text: str) -> int:
    return _whole(text, 1)


def _count_or_none(text: str) -> int:
    return _whole(text, 0)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_count(part.strip()) for part in text.split(",")))


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


_TYPES: Mapping[Any, Callable[[str], Any]] = {
    "int": int,
    "int | None": int,
    "float": float,
    "str": str,
    "str | None": str,
    "tuple[int, ...] | None": _counts,
    "tuple[str, ...]": _names,
}
