"""The command `tune --packed`: the maximum number of packed sequences for observed batches."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError

NOT_APPLICABLE = ("site", "phase", "max_size", "max_buckets", "max_bytes", "graphs")
MIN_BATCHES = 100  # the 99th percentile of fewer is their maximum


def parse_documents(text: str, source: str) -> dict[int, int] | list[Any]:
    """Parse a JSON object from documents per batch to number of batches, or a JSON list with a number per batch.

    Raises ConfigError that names `source` and the invalid entry.
    """
    try:
        found = json.loads(text, object_pairs_hook=lambda pairs: _object(pairs, source))
    except ValueError as exc:
        raise ConfigError(f"{source} is not valid JSON: {exc}") from exc
    if not isinstance(found, (dict, list)):
        raise ConfigError(
            f"{source} has {json.dumps(found)[:80]}: give a JSON object from documents per batch to number of "
            "batches, or a list with one number per batch"
        )
    return found


def _object(pairs: list[tuple[str, Any]], source: str) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for name, batches in pairs:
        if not (name.isascii() and name.isdigit()):
            raise ConfigError(f"{source} has the key {name!r}: keys are whole numbers of documents per batch")
        if int(name) in found:
            raise ConfigError(f"{source} has the key {name!r} twice: give each number of documents once")
        found[int(name)] = batches
    return found


def tune_packed(args: argparse.Namespace, text: str) -> int:
    """Print the maximum with the least expected cost, and what other maxima would cost."""
    from graph_cache.errors import GraphConfigError
    from graph_cache.tuning.packed_tuner import DEFAULT_EAGER_COST, histogram_of, packed_cost
    from graph_cache.tuning.packed_tuner import tune_packed as best_maximum

    for name in NOT_APPLICABLE:
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} does not apply to --packed: leave it out")
    cost = DEFAULT_EAGER_COST if args.eager_cost is None else args.eager_cost
    try:
        observed = histogram_of(parse_documents(text, args.packed))
    except GraphConfigError as exc:
        raise ConfigError(f"{args.packed}: {exc}") from exc
    best = best_maximum(observed, eager_cost=cost)
    shares = {"P50": 50, "P90": 90, "P99": 99, "all": 100}
    report = {
        "cuda_graph_max_packed_seqs": best.max_packed_seqs,
        "coverage": best.coverage,
        "expected_padding": best.expected_padding,
        "expected_cost": best.expected_cost,
        "eager_cost": cost,
        "best_for_eager_costs": list(best.eager_costs),
        "batches": best.batches,
        "sample_warning": _sample_warning(best.batches),
        "alternatives": [
            _alternative(label, _percentile(observed, percent), observed, packed_cost, cost)
            for label, percent in shares.items()
        ],
    }
    print(json.dumps(report, indent=1) if args.json else _text(report))
    return 0


def _sample_warning(batches: int) -> str | None:
    """Return why a sample is too thin to choose by, and what to do; None if it isn't."""
    if batches >= MIN_BATCHES:
        return None
    return f"{batches} batches are few to choose by: count at least {MIN_BATCHES}"


def _percentile(observed: Mapping[int, int], percent: int) -> int:
    """Return the least number of documents that covers this percentage of batches."""
    wanted, covered = percent * sum(observed.values()), 0
    for number, batches in observed.items():
        covered += 100 * batches
        if covered >= wanted:
            return number
    raise AssertionError("percent is above 100")


def _alternative(label: str, maximum: int, observed: Mapping[int, int], packed_cost: Any, cost: float) -> dict:
    covered = sum(batches for number, batches in observed.items() if number <= maximum)
    return {
        "name": label,
        "max_packed_seqs": maximum,
        "coverage": covered / sum(observed.values()),
        "expected_cost": packed_cost(maximum, observed, eager_cost=cost),
    }


def _text(report: Mapping[str, Any]) -> str:
    low, high = report["best_for_eager_costs"]
    upper = "up" if high is None else f"to {high:.0f}"
    lines = [
        f"observed   {report['batches']} batches; an eager batch costs as much as {report['eager_cost']:g} padding "
        "documents (--eager-cost)",
        *([f"warning    {report['sample_warning']}"] if report["sample_warning"] else []),
        f"best       {report['cuda_graph_max_packed_seqs']} documents, {100 * report['coverage']:.1f}% of batches "
        f"replay, {report['expected_padding']:.1f} padding documents per batch, expected cost "
        f"{report['expected_cost']:.1f}",
        f"why        it is the best for eager costs from {low:.0f} {upper}",
    ]
    lines += [
        f"{other['name']:<10} {other['max_packed_seqs']} documents, {100 * other['coverage']:.1f}% of batches replay, "
        f"expected cost {other['expected_cost']:.1f}"
        for other in report["alternatives"]
    ]
    lines.append(
        f"use it     cuda_graph_packed_seq=True, cuda_graph_max_packed_seqs={report['cuda_graph_max_packed_seqs']}"
    )
    return "\n".join(lines)
