"""The report of `encore bench`: offline latency and throughput of one engine.

measure.py defines the measurements.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.config import EngineConfig

UNSTEADY = 0.1
"""Variation of a figure over the repeats above which the report warns. On an idle machine it is below 0.05."""

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
    return "\n".join([*lines, *unsteady(report["batches"])])


def unsteady(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a warning for each batch size whose runs differ by more than UNSTEADY, with its most unsteady figure."""
    lines = []
    for row in rows:
        known = {name: value for name, value in row["variation"].items() if value is not None}
        worst = max(known, key=known.__getitem__, default=None)
        if worst is not None and known[worst] > UNSTEADY:
            lines.append(
                f"warning     batch {row['batch']}: {worst} differed by {_percent(known[worst])} between runs: close "
                "other programs, or raise --repeats and --output-tokens"
            )
    return lines


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def _zero_counters() -> dict[str, Any]:
    return {"batch_rows": [], "fallbacks": [], "real_tokens": [], "padded_tokens": []}
