"""Draw the recorded results as SVG files, and as PNG files with --png.

    python -m benchmarks plots [--results DIR] [--out DIR] [--png]

Needs matplotlib: pip install -e '.[bench]'. Each plot states the hardware, the versions, the commits and the dates of
its figures, which come from the JSON files. A plot whose file is missing is left out.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.plots.results import Series, offline, read_runs, rows_of, streams

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
# Okabe and Ito's colours, which people with colour-blindness can tell apart
BLUE, ORANGE, GREEN, RED, GREY, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#8C8C8C", "#56B4E9"
COLOURS = {"Encore": BLUE, "SGLang": ORANGE, "vLLM": GREEN}
MARKERS = {"Encore": "o", "SGLang": "s", "vLLM": "^"}
SHAPES = {"qwen3-0.6b": "Qwen3-0.6B", "qwen3-8b": "Qwen3-8B"}
STYLE = {
    "font.size": 10, "axes.titlesize": 11, "axes.titlelocation": "left", "axes.spines.top": False,
    "axes.spines.right": False, "axes.axisbelow": True, "grid.color": "#DDDDDD", "legend.frameon": False,
    "svg.hashsalt": "encore", "svg.fonttype": "none", "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
}  # fmt: skip


def figure(title: str, panels: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Make a figure with a title and `panels` panels side by side."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    made.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    axes = made.subplots(1, panels, squeeze=False)[0]
    return made, list(axes)


def caption(made: Figure, text: str) -> None:
    """Write a paragraph under the panels."""
    columns = int(made.get_figwidth() * 14.5)
    made.supxlabel("\n".join(textwrap.wrap(text, columns)), x=0.01, ha="left", fontsize=8, color="#444444")


def follow_theme(path: Path) -> None:
    """Let an SVG file turn dark for readers who prefer that."""
    style, end = (
        "@media (prefers-color-scheme: dark) { svg { filter: invert(.93) hue-rotate(180deg) brightness(1.3) } }",
        "</style>",
    )
    path.write_text(path.read_text("utf-8").replace(end, f"\n{style}\n{end}", 1), "utf-8")


def origin(series: Iterable[Series]) -> str:
    """Name the machine of some series, then each run's commit and date with the series that it measured."""
    series = list(series)
    machines = list(dict.fromkeys(one.run.machine for one in series))
    labels: dict[str, list[str]] = {}
    for one in series:
        found = labels.setdefault(one.run.origin, [])
        if one.label not in found:
            found.append(one.label)
    parts = [f"{', '.join(found)}: {where}" for where, found in labels.items()]
    return f"{'; '.join(machines)}. {'; '.join(parts)}."


def lines(axes: Axes, series: Sequence[Series], is_log: bool = True) -> None:
    """Draw series over a logarithmic x axis of sizes."""
    for one in series:
        engine, is_later = one.label.split()[0], one.label.endswith("later run")
        axes.plot(
            list(one.values), list(one.values.values()), color=SKY if is_later else COLOURS[engine.rstrip(",")],
            marker="D" if is_later else MARKERS[engine.rstrip(",")], markersize=4 if is_later else 5,
            linestyle="--" if is_later else "-", label=one.label,
        )  # fmt: skip
    size_axis(axes, sorted({x for one in series for x in one.values}))
    if is_log:
        axes.set_yscale("log")
    plain_numbers(axes)
    axes.grid(True, which="major")


def size_axis(axes: Axes, sizes: Sequence[int]) -> None:
    """Put the measured sizes on a logarithmic x axis."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())


def plain_numbers(axes: Axes) -> None:
    """Label the y axis with plain numbers, four in each decade where it is logarithmic."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 4, 7)))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def bars(axes: Axes, values: dict[str, float | None], colours: Sequence[str], number: Callable[[float], str]) -> None:
    """Draw horizontal bars, the first one on top, each with its value at its end; None is shown as not measured."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    drawn = axes.barh(list(values), [value or 0 for value in values.values()], color=colours, height=0.7)
    texts = ["not measured" if value is None else number(value) for value in values.values()]
    axes.bar_label(drawn, texts, padding=3, fontsize=9)
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.set_xlim(0, max(value or 0 for value in values.values()) * 1.3)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.tick_params(axis="y", length=0)
    axes.grid(True, axis="x")


def decode_latency(folder: Path) -> Figure:
    runs = read_runs(folder / "h200-offline.json")
    made, panels = figure("Decode step time by batch size (lower is better)", len(SHAPES), 10, 4.6)
    drawn = []
    for axes, (shape, title) in zip(panels, SHAPES.items(), strict=True):
        series = offline(runs, shape, "decode_ms")
        batches = set.intersection(*(set(one.values) for one in series))
        series = [one._replace(values={x: one.values[x] for x in sorted(batches)}) for one in series]
        lines(axes, series)
        axes.set(title=title, xlabel="batch size", ylabel="ms per step")
        axes.legend()
        drawn += [one._replace(label=f"{title} {one.label}") for one in series]
    caption(made, f"512-token prompts, greedy, random weights, bf16. {origin(drawn)}")
    return made


def overview(folder: Path) -> Figure:
    """Draw what the README shows: Encore beside the engines that ran on the same machine, without later runs."""
    made, panels = figure("Encore beside SGLang and vLLM", 3, 12, 4.4)
    offline_runs, http_runs = read_runs(folder / "h200-offline.json"), read_runs(folder / "h200-http.json")
    drawn = []
    for axes, (shape, title) in zip(panels, SHAPES.items(), strict=False):
        drawn += _beside(axes, offline(offline_runs, shape, "decode_ms"))
        axes.set(title=f"Decode step, {title}\n(lower is better)", xlabel="batch size", ylabel="ms per step")
    drawn += _beside(panels[2], streams(http_runs, lambda row: row["tokens_per_second"]))
    title = "Streaming over HTTP, Qwen3-0.6B\n(higher is better)"
    panels[2].set(title=title, xlabel="clients", ylabel="tokens per second")
    runs = list({one.run.commit: one.run for one in drawn}.values())
    machines = "; ".join(dict.fromkeys(one.machine for one in runs))
    commits = ", ".join(one.commit for one in runs)
    dates = sorted({one.date for one in runs})
    text = f"512-token prompts, greedy, random weights, bf16. {machines}."
    caption(made, f"{text} Commits {commits}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}.")
    return made


def _beside(axes: Axes, series: Sequence[Series]) -> list[Series]:
    """Draw the series of one run, at the sizes that all of them have, and return them."""
    series = [one for one in series if not one.label.endswith("later run")]
    sizes = sorted(set.intersection(*(set(one.values) for one in series)))
    series = [one._replace(values={x: one.values[x] for x in sizes}) for one in series]
    lines(axes, series)
    axes.legend()
    return series


def throughput(folder: Path) -> Figure:
    runs = read_runs(folder / "h200-offline.json")
    figures = {
        "prefill_tokens_per_s": ("Prefill tokens/s\n(higher is better)", "{:,.0f}"),
        "output_tokens_per_s": ("Output tokens/s\n(higher is better)", "{:,.0f}"),
        "first_token_ms": ("First token, ms\n(lower is better)", "{:.1f}"),
    }
    from matplotlib.figure import Figure

    made = Figure(figsize=(11, 4.6), layout="constrained")
    made.suptitle("Offline prefill, throughput and first token", x=0.01, ha="left", fontsize=13, fontweight="bold")
    drawn = []
    for row, (shape, name) in zip(made.subplots(len(SHAPES), len(figures)), SHAPES.items(), strict=True):
        for axes, (key, (title, number)) in zip(row, figures.items(), strict=True):
            series = offline(runs, shape, key)
            values = {one.label.replace(", later run", ",\nlater run"): one.values[key] for one in series}
            colours = [SKY if "later" in one.label else COLOURS[one.label.split()[0]] for one in series]
            bars(axes, values, colours, number.format)
            if shape == next(iter(SHAPES)):
                axes.set_title(title)
            drawn += [one._replace(label=f"{name} {one.label}") for one in series]
        row[0].set_ylabel(name, fontweight="bold")
    text = "Prefill: 32 prompts of 1,024 tokens. Output: 1,024 requests of 128 to 1,024 tokens in and out. "
    text += "First token: one prompt of 512."
    caption(made, f"{text} Random weights, bf16, greedy. {origin(drawn)}")
    return made


def http_streams(folder: Path) -> Figure:
    runs = read_runs(folder / "h200-http.json")
    made, panels = figure("Streaming over HTTP, Qwen3-0.6B shape", 3, 12, 4.4)
    shown = {
        "Tokens/s (higher is better)": ("tokens per second", lambda row: row["tokens_per_second"]),
        "First token, median (lower is better)": ("ms", lambda row: row["first_token_ms"]["median"]),
        "Between tokens, median (lower is better)": ("ms", lambda row: row["inter_token_ms"]["median"]),
    }
    for axes, (title, (unit, value)) in zip(panels, shown.items(), strict=True):
        series = streams(runs, value)
        lines(axes, series)
        axes.set(title=title, xlabel="clients", ylabel=unit)
    panels[0].legend()
    found = series[0].run.found
    text = f"{found['prompt_tokens']}-token prompts, {found['output_tokens']} output tokens, 4 HTTP workers"
    caption(made, f"{text}, random weights, bf16. Median of each server's turns. {origin(series)}")
    return made


def _way(way: str) -> tuple[str, str]:
    """The label and the colour of a way to run a training step."""
    return {
        "eager": ("eager", GREY),
        "layer": ("Encore, per layer", BLUE),
        "iteration": ("Encore, iteration", BLUE),
        "attn_mlp": ("Encore, attention and MLP", BLUE),
        "transformer_engine": ("Encore, TE's graphs", BLUE),
        "layer_compiled": ("Encore, per layer, compiled", BLUE),
        "iteration_compiled": ("Encore, iteration, compiled", BLUE),
        "compile": ("torch.compile, reduce-overhead", RED),
        "make_graphed_callables": ("torch make_graphed_callables", RED),
        "megatron_local": ("Megatron, local", RED),
        "megatron_transformer_engine": ("Megatron, TE's graphs", RED),
    }[way]


def training_step(folder: Path) -> Figure:
    return _training(folder / "h200-training-step.json", "Training step of a 24-layer GPT (lower is better)", 12)


def megatron_step(folder: Path) -> Figure:
    title = "Training step of Megatron-Core's GPTModel (lower is better)"
    return _training(folder / "h200-megatron-step.json", title, 8)


def _training(path: Path, title: str, width: float) -> Figure:
    run = next(run for run in read_runs(path) if any(row["way"] == "eager" for row in rows_of(run)))
    rows = [row for row in rows_of(run) if "ms" in row]
    batches = sorted({row["batch"] for row in rows})
    made, panels = figure(title, len(batches), width, 4.2)
    ways = list(dict.fromkeys(row["way"] for row in rows))
    for axes, batch in zip(panels, batches, strict=True):
        found = {row["way"]: row["ms"] for row in rows if row["batch"] == batch}
        bars(axes, {_way(way)[0]: found.get(way) for way in ways}, [_way(way)[1] for way in ways], "{:.1f}".format)
        axes.set(title=f"batch {batch}", xlabel="ms per step")
        axes.tick_params(labelleft=axes is panels[0])
    caption(made, f"Width 1,024, 512 tokens, bf16, AdamW. {run.machine}. {run.origin.capitalize()}.")
    return made


def two_gpus(folder: Path) -> Figure:
    runs = read_runs(folder / "h200-two-gpus.json")
    decode = next(run for run in runs if "decode_8b" in run.found)
    exchange = next(run for run in runs if "exchange_us" in run.found)
    made, (left, right) = figure("Tensor parallelism over two GPUs (lower is better)", 2, 10, 4.4)
    steps = decode.found["decode_8b"]["ms"]
    for place, (key, label, colour) in enumerate((("one_gpu", "one GPU", GREY), ("two_gpus", "two GPUs", BLUE))):
        drawn = left.bar([x + 0.38 * (place - 0.5) for x in range(len(steps))], [one[key] for one in steps.values()],
                         0.36, color=colour, label=label)  # fmt: skip
        left.bar_label(drawn, fmt="{:.2f}", padding=2, fontsize=9)
    left.set_xticks(range(len(steps)), list(steps))
    left.set(title="Decode step, Qwen3-8B shape", xlabel="batch size", ylabel="ms per step")
    left.set_ylim(0, max(one["one_gpu"] for one in steps.values()) * 1.2)
    left.legend(loc="upper center", ncols=2)
    left.grid(True, axis="y")
    rows = exchange.found["exchange_us"]["rows"]
    ways = {"torch_symm_mem_one_shot": ("torch symmetric memory, one-shot", GREEN, "^"), "nccl": ("NCCL", ORANGE, "s"),
            "ours": ("Encore", BLUE, "o")}  # fmt: skip
    for key, (label, colour, marker) in ways.items():
        right.plot([int(size) for size in rows], [one[key] for one in rows.values()], color=colour, marker=marker,
                   label=label)  # fmt: skip
    size_axis(right, [int(size) for size in rows])
    right.set(title="All-reduce inside a graph, [rows, 4096] bf16", xlabel="rows", ylabel="µs added to a linear layer")
    right.set_ylim(0)
    right.legend(loc="upper left")
    right.grid(True)
    caption(made, f"{decode.machine}. Decode: {decode.origin}. All-reduce: {exchange.origin}.")
    return made


def cpu(folder: Path) -> Figure:
    [run] = read_runs(folder / "cpu-smollm2.json")
    found = run.found
    peers = found["peers"] if "peers" in found else {row["engine"]: row for row in rows_of(run)}
    batches = found["settings"]["batches"]
    colours = {"encore": BLUE, "llama.cpp": ORANGE, "transformers bf16": GREEN, "transformers fp32": GREEN}
    made, panels = figure("SmolLM2-135M on a CPU, 2 threads (higher is better)", len(batches), 10, 3.8)
    for axes, batch in zip(panels, batches, strict=True):
        key = f"batch_{batch}_overall"
        names = [name for name in colours if f"{key}_tokens_per_second" in peers.get(name, {})]
        labels = [
            " ".join(filter(None, (name.capitalize() if name == "encore" else name,
                                   peers[name]["about"].get("version")))) for name in names
        ]  # fmt: skip
        values = [peers[name][f"{key}_tokens_per_second"] for name in names]
        spread = [peers[name][f"{key}_rounds"] for name in names]
        axes.barh(labels, values, color=[colours[name] for name in names], height=0.65)
        errors = [[value - min(all_) for value, all_ in zip(values, spread, strict=True)],
                  [max(all_) - value for value, all_ in zip(values, spread, strict=True)]]  # fmt: skip
        axes.errorbar(values, labels, xerr=errors, fmt="none", ecolor="black", elinewidth=1, capsize=3)
        for place, (value, all_) in enumerate(zip(values, spread, strict=True)):
            axes.text(max(all_) + max(values) * 0.03, place, f"{value:.0f}", va="center", fontsize=9)
        axes.invert_yaxis()
        axes.set_xlim(0, max(max(all_) for all_ in spread) * 1.15)
        axes.tick_params(axis="y", length=0)
        axes.set(title=f"batch {batch}", xlabel="output tokens per second")
        axes.grid(True, axis="x")
    text = f"{found['settings']['prompt_tokens']}-token prompts, {found['settings']['tokens']} output tokens, greedy"
    text += f"; medians and ranges of {found['settings']['rounds']} alternating rounds"
    caption(made, f"{text}. {run.machine}. {run.origin.capitalize()}.")
    return made


def graph_capture(folder: Path) -> Figure:
    [run] = read_runs(folder / "h200-graph-capture.json")
    rows = run.found.get("replay") or rows_of(run)
    shape = run.found.get("shape") or run.found["settings"]["shape"]
    made, [axes] = figure(f"Decode step, graph replay beside eager, {SHAPES[shape]} shape", 1, 7, 4.4)
    batches = [row["batch"] for row in rows]
    for key, label, colour, marker in (("eager_ms", "eager", GREY, "s"), ("replay_ms", "graph replay", BLUE, "o")):
        axes.plot(batches, [row[key] for row in rows], color=colour, marker=marker, label=label)
    for row in rows:
        axes.annotate(f"{row['speedup']:.1f}×", (row["batch"], row["replay_ms"]), (0, 7), textcoords="offset points",
                      ha="center", fontsize=9, color=BLUE)  # fmt: skip
    size_axis(axes, batches)
    axes.set_yscale("log")
    axes.set_ylim(1, 20)
    plain_numbers(axes)
    axes.set(xlabel="batch size", ylabel="ms per step")
    axes.grid(True)
    axes.legend(loc="center right")
    caption(made, f"Random weights, bf16. {run.machine}. {run.origin.capitalize()}.")
    return made


PLOTS: dict[str, Callable[[Path], Figure]] = {
    "overview": overview,
    "decode-latency": decode_latency,
    "throughput": throughput,
    "http-streams": http_streams,
    "training-step": training_step,
    "megatron-step": megatron_step,
    "two-gpus": two_gpus,
    "cpu": cpu,
    "graph-capture": graph_capture,
}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks plots", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="the folder of the JSON files")
    parser.add_argument("--out", type=Path, default=ROOT / "plots", help="the folder to write to")
    parser.add_argument("--png", action="store_true", help="write PNG files too")
    args = parser.parse_args(argv)
    for name in ("results", "out"):
        if not getattr(args, name).is_dir():
            parser.error(f"--{name}: {getattr(args, name)} is not a folder")
    try:
        import matplotlib
    except ImportError:
        parser.error("needs matplotlib, which is not installed: pip install -e '.[bench]'")
    drawn = 0
    for name, draw in PLOTS.items():
        with matplotlib.rc_context(STYLE):
            try:
                made = draw(args.results)
            except FileNotFoundError as error:
                print(f"{name}: left out, {error.filename} does not exist")
                continue
            made.savefig(args.out / f"{name}.svg", metadata={"Date": None})
            follow_theme(args.out / f"{name}.svg")
            if args.png:
                made.savefig(args.out / f"{name}.png", dpi=110)
        print(args.out / f"{name}.svg")
        drawn += 1
    return 0 if drawn else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
