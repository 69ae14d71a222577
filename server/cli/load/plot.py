"""A plot of one load: the distribution of its latencies, and tokens and requests over time. Needs matplotlib."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from server.cli.load.client import Measured
from server.cli.load.report import LATENCIES, latencies

# Okabe and Ito's colours, which people with colour-blindness can tell apart
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00")
LINE = "#444444"
BINS = 60
SUFFIXES = (".svg", ".png", ".pdf")
STYLE: dict[Any, Any] = {
    "font.size": 10, "axes.titlesize": 11, "axes.titlelocation": "left", "axes.spines.top": False,
    "axes.spines.right": False, "axes.axisbelow": True, "grid.color": "#DDDDDD", "legend.frameon": False,
}  # fmt: skip


def require_plot(path: str) -> None:
    """Raise ConfigError if a plot can't be written to `path`, before the load rather than after it."""
    if Path(path).suffix not in SUFFIXES:
        raise ConfigError(f"--plot {path}: must end in {', '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'encore-serve[bench]', or leave it out")


def draw(report: dict[str, Any], results: Sequence[Measured], path: str) -> None:
    """Draw the plot and write it to `path`."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(10, 4), layout="constrained")
        figure.suptitle(f"{report['model_id']}: {_load(report)}", x=0.01, ha="left", fontsize=12, fontweight="bold")
        left, right = figure.subplots(1, 2)
        _distributions(left, results)
        _over_time(right, results)
        figure.savefig(os.fspath(path))


def _load(report: dict[str, Any]) -> str:
    rate = "all at once" if report["request_rate"] == "inf" else f"{report['request_rate']:g} requests/s"
    limit = f", at most {report['max_concurrency']} at once" if report["max_concurrency"] else ""
    return f"{report['num_prompts']} requests, {rate}{limit}"


def _distributions(axes: Any, results: Sequence[Measured]) -> None:
    for (name, _), colour in zip(LATENCIES, COLOURS, strict=True):
        times = sorted(1e3 * one for one in latencies(results)[name])
        if times:
            shares = [100 * (number + 1) / len(times) for number in range(len(times))]
            axes.step([max(one, 1e-3) for one in times], shares, where="post", label=name.upper(), color=colour)
    axes.set_xscale("log")
    axes.set(xlabel="latency in ms", ylabel="share of requests (ITL: of gaps) below, %", ylim=(0, 100))
    axes.grid(True)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.05), ncols=len(LATENCIES))


def _over_time(axes: Any, results: Sequence[Measured]) -> None:
    """Draw the events with text per second, and the mean number of requests that run."""
    end = max((one.ended for one in results), default=1.0)
    width = max(end / BINS, 0.1)
    edges = [width * number for number in range(int(end / width) + 2)]
    events, running = [0.0] * (len(edges) - 1), [0.0] * (len(edges) - 1)
    for one in results:
        for time in one.arrivals:
            events[int(time / width)] += 1 / width
        for number in range(int(one.sent / width), int(one.ended / width) + 1):
            running[number] += max(0.0, min(one.ended, edges[number + 1]) - max(one.sent, edges[number])) / width
    axes.stairs(events, edges, fill=True, color=COLOURS[0], alpha=0.6)
    axes.set(title="Events with text per second (blue), running requests (line)", xlabel="seconds", ylabel="events/s")
    axes.grid(True)
    other = axes.twinx()
    other.spines["right"].set_visible(True)
    other.stairs(running, edges, color=LINE, linewidth=1.5)
    other.set(ylabel="running requests", ylim=(0, None))
