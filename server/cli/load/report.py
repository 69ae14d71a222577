"""Figures of a load: throughput, and latencies with the names of vLLM's benchmark, as JSON and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from server.cli.load.client import Measured

PERCENTILES = (50, 90, 95, 99)
LATENCIES = (
    ("ttft", "Time to first token"),
    ("tpot", "Time per output token (without the first)"),
    ("itl", "Inter-token latency"),
    ("e2el", "End-to-end latency"),
)


def latencies(results: Sequence[Measured]) -> dict[str, list[float]]:
    """Return the latencies of the requests that succeeded, in seconds.

    ttft: from a request to its first text. tpot: from there to the end, per further output token. itl: between two
    events with text. e2el: from a request to the end of its response.
    """
    found: dict[str, list[float]] = {name: [] for name, _ in LATENCIES}
    for one in results:
        if one.error:
            continue
        found["e2el"].append(one.ended - one.sent)
        if one.arrivals:
            found["ttft"].append(one.arrivals[0] - one.sent)
            found["itl"] += [later - earlier for earlier, later in zip(one.arrivals, one.arrivals[1:], strict=False)]
            if (tokens := output_tokens(one)) > 1:
                found["tpot"].append((one.ended - one.arrivals[0]) / (tokens - 1))
    return found


def output_tokens(one: Measured) -> int:
    """Return the tokens of a response: those that the server counted, else its events."""
    return len(one.arrivals) if one.output_tokens is None else one.output_tokens


def summary(results: Sequence[Measured], estimated: Sequence[int], client_seconds: float) -> dict[str, Any]:
    """Return the figures. `estimated` are the prompts' lengths, for a server that doesn't count them."""
    good = [one for one in results if not one.error]
    duration = max((one.ended for one in results), default=0.0)
    inputs = sum(
        guess if one.prompt_tokens is None else one.prompt_tokens
        for one, guess in zip(results, estimated, strict=True) if not one.error
    )  # fmt: skip
    outputs = sum(map(output_tokens, good))
    errors: dict[str, int] = {}
    for one in results:
        if one.error:
            errors[one.error] = errors.get(one.error, 0) + 1
    found: dict[str, Any] = {
        "duration": round(duration, 4),
        "completed": len(good),
        "failed": len(results) - len(good),
        "errors": dict(sorted(errors.items(), key=lambda item: -item[1])[:10]),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": _rate(len(good), duration),
        "output_throughput": _rate(outputs, duration),
        "total_token_throughput": _rate(inputs + outputs, duration),
        "max_concurrent_requests": most_at_once(results),
        "client_utilization": round(client_seconds / duration, 3) if duration else 0.0,
    }
    for name, times in latencies(results).items():
        found |= _statistics(name, times)
    return found


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 3) if seconds else 0.0


def _statistics(name: str, seconds: list[float]) -> dict[str, float | None]:
    """Return mean, median, standard deviation and percentiles in ms; None without values."""
    if not seconds:
        keys = ("mean", "median", "std", *(f"p{one}" for one in PERCENTILES))
        return {f"{key}_{name}_ms": None for key in keys}
    ordered = sorted(seconds)
    figures = {
        "mean": statistics.fmean(ordered), "median": statistics.median(ordered), "std": statistics.pstdev(ordered),
        **{f"p{one}": percentile(ordered, one) for one in PERCENTILES},
    }  # fmt: skip
    return {f"{key}_{name}_ms": round(1e3 * value, 3) for key, value in figures.items()}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of sorted values, interpolated between the nearest two as numpy does."""
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def most_at_once(results: Sequence[Measured]) -> int:
    """Return the largest number of requests that were running at one time."""
    changes = sorted([(one.sent, 1) for one in results] + [(one.ended, -1) for one in results])
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


def table(report: dict[str, Any]) -> str:
    """Format the report as a table."""
    rows = [
        ("Successful requests", f"{report['completed']:,}"),
        ("Failed requests", f"{report['failed']:,}"),
        ("Duration", f"{report['duration']:,.2f} s"),
        ("Input tokens", f"{report['total_input_tokens']:,}"),
        ("Output tokens", f"{report['total_output_tokens']:,}"),
        ("Requests", f"{report['request_throughput']:,.2f} /s"),
        ("Output tokens", f"{report['output_throughput']:,.1f} /s"),
        ("Input and output tokens", f"{report['total_token_throughput']:,.1f} /s"),
        ("Most requests at once", f"{report['max_concurrent_requests']:,}"),
    ]
    lines = [f"{name:<42}{value:>12}" for name, value in rows]
    columns = ("mean", "median", *(f"p{one}" for one in PERCENTILES[1:]))
    lines.append("\n" + f"{'Latency in ms':<42}" + "".join(f"{column:>12}" for column in columns))
    for name, title in LATENCIES:
        values = (report[f"{column}_{name}_ms"] for column in columns)
        cells = "".join(f"{'-' if value is None else format(value, ',.2f'):>12}" for value in values)
        lines.append(
            f"{f'{title} ({name.upper()})' if len(title) < 34 else f'{title[:21]} ({name.upper()})':<42}{cells}"
        )
    return "\n".join(lines)
