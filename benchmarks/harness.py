"""Shared by all benchmarks: arguments, alternating runs, tables and JSON files.

Imports only the standard library at the top. PyTorch and the engine are imported where they are used, so that
`serving.http_streams` runs on a machine that has neither. Timing on a device is in timing.py.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
BUSY_SECONDS = 0.5  # until busy processes have started


def parser(module: str, doc: str) -> argparse.ArgumentParser:
    """Return a parser for a benchmark: its docstring is the help text, and it has --json."""
    made = argparse.ArgumentParser(
        prog=f"python -m {module}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", type=output_file, metavar="FILE", help="write the results to FILE")
    return made


def output_file(text: str) -> Path:
    """Convert an argument to a path whose folder exists, so that a run does not fail at its end."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        reason = "is a folder" if path.is_dir() else f"lies in {path.parent}, which is not a folder"
        raise argparse.ArgumentTypeError(f"{text!r} {reason}; name a file in an existing folder")
    return path


def count(text: str) -> int:
    """Convert an argument to an integer of at least 1."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def positive(text: str) -> float:
    """Convert an argument to a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def counts(text: str) -> list[int]:
    """Convert an argument such as 1,8,32 to a list of integers of at least 1."""
    return [count(part) for part in text.split(",")]


def counts_from_zero(text: str) -> list[int]:
    """Convert an argument such as 0,2 to a list of integers of at least 0."""
    return [0 if part.strip() == "0" else count(part) for part in text.split(",")]


def names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a converter of comma-separated names, all of which must be among `known`."""
    known = list(known)

    def convert(text: str) -> list[str]:
        found = text.split(",")
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is unknown; choose from {', '.join(known)}")
        return found

    return convert


def quantile_ms(seconds: list[float], share: float) -> float | None:
    """Return a quantile of sorted seconds in ms, by nearest rank; None without values."""
    return round(1e3 * seconds[min(len(seconds) - 1, math.ceil(share * len(seconds)) - 1)], 3) if seconds else None


def require_gpus(of: argparse.ArgumentParser, needed: int = 1) -> None:
    """Exit with a usage error where PyTorch sees fewer CUDA devices than `needed`."""
    import torch

    found = torch.cuda.device_count()
    if found < needed:
        of.error(f"needs {needed} CUDA device{'s' * (needed > 1)}; torch.cuda.device_count() is {found}")


def alternate(ways: dict[str, Callable[[], T]], rounds: int, pause_seconds: float = 0.0) -> dict[str, list[T]]:
    """Call each way once a round, in reverse order every second round; return each way's results in order.

    A machine that slows down over time, or a neighbour's load, then affects all ways alike.
    """
    found: dict[str, list[T]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways) if number % 2 == 0 else reversed(ways):
            time.sleep(pause_seconds)
            found[name].append(ways[name]())
    return found


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Run processes within the block that each keep a core busy."""
    with ExitStack() as stack:
        for _ in range(number):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(process.wait)
            stack.callback(process.kill)
        if number:
            time.sleep(BUSY_SECONDS)
        yield


class Report:
    """The results of one run: progress lines, a table at the end, and a JSON file where --json was given.

    The file holds date, commit, hardware, versions and command (`engine.bench.measure.circumstances`), "benchmark"
    (its name for `python -m benchmarks`), "settings" (all arguments), "rows", and what `finish` is given.
    """

    def __init__(self, module: str, args: argparse.Namespace, argv: Sequence[str]):
        self._path: Path | None = args.json
        self.rows: list[dict[str, Any]] = []
        self._found: dict[str, Any] = {}
        if self._path is not None:  # taken before the run: its load average is the machine's own
            from engine.bench.measure import circumstances

            self._found = circumstances(["python", "-m", module, *argv])
            self._found["benchmark"] = module.removeprefix("benchmarks.")
            self._found["settings"] = {
                name: str(value) if isinstance(value, Path) else value
                for name, value in vars(args).items()
                if name not in ("json", "one")
            }

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row of results and print it as a line of JSON. Writes the file: a run may be cut off later."""
        self.rows.append(row)
        self._write({})
        print(json.dumps(row), flush=True)

    def finish(self, columns: Sequence[str] | None = None, **figures: Any) -> None:
        """Write the file and print the rows as a table. `figures`: results that are not in rows."""
        self._write(figures)
        print(f"\n{table(self.rows, columns)}", flush=True)

    def _write(self, figures: Mapping[str, Any]) -> None:
        if self._path is not None:
            self._path.write_text(json.dumps(self._found | {"rows": self.rows} | figures, indent=1) + "\n")


def flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Join the keys of nested dictionaries with dots; leave out lists and empty values."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, str | int | float):
            found[f"{prefix}{name}"] = value
    return found


def table(rows: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None) -> str:
    """Align rows under the names of their values, "-" for what a row lacks.

    `columns` picks and orders the values (`flat` names); without it all are shown in the order of their appearance. A
    column that no row has is left out.
    """
    flattened = [flat(row) for row in rows]
    present = list(dict.fromkeys(name for row in flattened for name in row))
    columns = present if columns is None else [name for name in columns if name in present]
    lines = [list(columns), *([_cell(row.get(name)) for name in columns] for row in flattened)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    is_text = [any(isinstance(row.get(name), str) for row in flattened) for name in columns]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(line, widths, is_text, strict=True)
        ).rstrip()
        for line in lines
    )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
